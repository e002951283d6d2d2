"""Transports between server and devices: the interface, MQTT and Flower, each with both ends in one folder."""
