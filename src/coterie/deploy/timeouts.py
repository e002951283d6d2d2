"""How long the server waits for devices."""

from __future__ import annotations

from dataclasses import dataclass, field

from coterie.core.errors import CoterieError


@dataclass(frozen=True)
class Timeouts:
    """How long the server waits, in seconds."""

    deadline: float = field(default=600.0, metadata={"help": "seconds that clients have for an answer"})
    grace: float = field(default=30.0, metadata={"help": "seconds that a disconnected device has to reconnect"})
    wait: float = field(default=3600.0, metadata={"help": "seconds to wait for enough devices"})

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise CoterieError(f"--{name} must be more than 0 seconds, got {value:g}")
