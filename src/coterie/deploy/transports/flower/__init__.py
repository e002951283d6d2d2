"""The Flower transport: both ends of the connection, the apps that Flower runs, and the folder for `flwr run`."""

from coterie.deploy.transports.flower.apps import client_app, server_app
from coterie.deploy.transports.flower.connection import FlowerConnection, Packet
from coterie.deploy.transports.flower.device import FlowerDevice
from coterie.deploy.transports.flower.folder import write_app
from coterie.deploy.transports.flower.server import FlowerTransport

__all__ = ["FlowerConnection", "FlowerDevice", "FlowerTransport", "Packet", "client_app", "server_app", "write_app"]
