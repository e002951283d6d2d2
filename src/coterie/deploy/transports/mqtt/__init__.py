"""The MQTT transport: the connection to a broker, the server's end and the device's end."""

from coterie.deploy.transports.mqtt.connection import Broker, MqttConnection
from coterie.deploy.transports.mqtt.device import MqttDevice
from coterie.deploy.transports.mqtt.server import MqttTransport

__all__ = ["Broker", "MqttConnection", "MqttDevice", "MqttTransport"]
