"""A post whose devices come by themselves, and say which clients they have."""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Callable

from coterie.clients.remote import Event, Gone, Here, Post

Greeting = tuple[tuple[int, ...], str | None]  # the clients of a device; the federation that it is ready for, if here
Greet = Callable[[str, bytes], Greeting]


class Devices(Post):
    """greet: is given the name of a device and what it says of itself; Refused if it cannot be part of this.

    What it says is nothing, if it has left.
    """

    def __init__(self, greet: Greet) -> None:
        self.greet = greet
        self.owner: dict[int, str] = {}  # client -> device
        self.here: dict[str, str] = {}  # device -> the federation that it is ready for
        self.gone: dict[str, float] = {}  # device -> when it went
        self.traffic = [0, 0]  # bytes received and sent
        self.federation = ""  # once it has begun: devices must be ready for it

    @abstractmethod
    def announce(self, federation: str, brief: bytes, start: bytes, most: int) -> None:
        """The federation begins. Devices are here when they say that they are ready for it.

        most: bytes of an answer.
        """

    def present(self, client: int) -> bool:
        return self.here.get(self.owner.get(client, "")) == self.federation

    def left(self, client: int) -> float:
        return self.gone.get(self.owner.get(client, ""), -math.inf)

    def meet(self, device: str, payload: bytes) -> Event | None:
        """What a device says of itself."""
        clients, ready = self.greet(device, payload)
        if ready is None:
            self.leave(device)
            return Gone(clients)
        if ready != self.federation == self.here.get(device):
            self.leave(device)  # it was started again, or an old word of its came late: it will be ready soon
        self.here[device] = ready
        self.owner |= dict.fromkeys(clients, device)
        return Here(clients) if ready == self.federation else None

    def leave(self, device: str) -> None:
        if self.here.pop(device, None) is not None:
            self.gone[device] = time.monotonic()
