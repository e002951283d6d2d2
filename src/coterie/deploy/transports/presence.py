"""A transport that knows which devices are connected, and which clients they host."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable

from coterie.deploy.transports.interface import DeviceConnected, DeviceDisconnected, Event, Transport

Registration = tuple[tuple[int, ...], str | None]  # clients of a device; the federation it is ready for, if connected
Register = Callable[[str, bytes], Registration]


class DeviceTransport(Transport):
    """register: takes the name and the hello of a device; an empty hello means that it disconnected.

    It raises `Refused` for a device that cannot take part.
    """

    def __init__(self, register: Register) -> None:
        self.register = register
        self.owner: dict[int, str] = {}  # client -> device
        self.connected: dict[str, str] = {}  # device -> the federation that it is ready for
        self.disconnected: dict[str, float] = {}  # device -> when it disconnected
        self.started = time.monotonic()
        self.traffic = [0, 0]  # bytes received and sent
        self.federation = ""  # id, once the federation has begun

    @abstractmethod
    def announce(self, federation: str, terms: bytes, start: bytes, max_answer: int) -> None:
        """Begin the federation. Devices are ready once they have accepted its terms.

        max_answer: upper bound on the bytes of an answer.
        """

    def is_ready(self, client: int) -> bool:
        return self.connected.get(self.owner.get(client, "")) == self.federation

    def device_status(self, client: int) -> str:
        device = self.owner.get(client)
        if device is None:
            return "no device hosts it"
        return f"device {device} is starting" if device in self.connected else f"device {device} is not connected"

    def last_seen(self, client: int) -> float:
        """For a device that was never connected, when the server started: after a restart it reconnects soon."""
        return self.disconnected.get(self.owner.get(client, ""), self.started)

    def update_presence(self, device: str, hello: bytes) -> Event | None:
        clients, ready = self.register(device, hello)
        if ready is None:
            self.disconnect(device)
            return DeviceDisconnected(clients)
        if ready != self.federation == self.connected.get(device):
            self.disconnect(device)  # it restarted, or an old hello arrived late: it will be ready soon
        self.connected[device] = ready
        self.owner |= dict.fromkeys(clients, device)
        return DeviceConnected(clients) if ready == self.federation else None

    def disconnect(self, device: str) -> None:
        if self.connected.pop(device, None) is not None:
            self.disconnected[device] = time.monotonic()
