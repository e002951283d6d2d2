"""The server's side of a transport: it carries requests to clients, and answers back."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import NamedTuple

from coterie.deploy.messages import Message


class AnswerReceived(NamedTuple):
    """An answer arrived under the name of this client; it is not validated yet."""

    client: int
    message: bytes


class DeviceConnected(NamedTuple):
    """The device of these clients connected or reconnected; earlier requests may be lost."""

    clients: tuple[int, ...]


class DeviceDisconnected(NamedTuple):
    clients: tuple[int, ...]


Event = AnswerReceived | DeviceConnected | DeviceDisconnected


class Transport(ABC):
    """Sends requests to clients and receives their answers."""

    @abstractmethod
    def send(self, client: int, request: Message) -> None: ...

    @abstractmethod
    def receive(self, seconds: float) -> Event | None:
        """Wait for the next event; None after this many seconds without one."""

    @abstractmethod
    def is_ready(self, client: int) -> bool:
        """Whether the device of this client is connected and ready."""

    def device_status(self, client: int) -> str:
        """The state of a device that is not ready, for messages."""
        return "its device is not connected"

    def last_seen(self, client: int) -> float:
        """When the device of this client disconnected, by time.monotonic()."""
        return -math.inf

    @abstractmethod
    def announce_phase(self, kind: str, round: int, clients: list[int], seconds: float) -> None:
        """Publish which requests are sent to which clients now."""

    @abstractmethod
    def report_refusal(self, client: int, reason: str) -> None:
        """Inform the device of this client that its message was refused."""

    @abstractmethod
    def end_federation(self) -> None:
        """Inform all devices that the federation has ended."""

    @abstractmethod
    def close(self) -> None: ...
