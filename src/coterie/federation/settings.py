"""The settings of a federation: rounds, participation, learning rates, checkpoints and limits."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from coterie.core import ranges
from coterie.core.errors import CoterieError
from coterie.core.explicit import Explicit
from coterie.core.typed import check_types

MAX_SEED = 1 << 63  # seeds are below this


@dataclass(frozen=True)
class Settings(Explicit):
    """How a federation runs, independently of the method."""

    rounds: int = field(default=200, metadata={"help": "communication rounds", "short": ("gr",)})
    join_ratio: float = field(
        default=1.0, metadata={"help": "share of clients that take part in a round", "short": ("jr",)}
    )
    full_last_round: bool = field(
        default=False, metadata={"help": "after the last round all clients train once more and are evaluated"}
    )
    lr_decay: float = field(default=1.0, metadata={"help": "factor on the learning rate per round"})
    lr_steps: tuple[tuple[int, float], ...] = field(
        default=(), metadata={"help": "factors on the learning rate from given rounds on, such as 50:0.2,75:0.02"}
    )
    new_clients: float | str = field(
        default=0.0,
        metadata={"help": "clients that do not train and join at the end: a share, or names such as s22,s23"},
    )
    evaluate_every: int = field(
        default=1, metadata={"help": "rounds between evaluations; the last round is always evaluated"}
    )
    seed: int = field(default=0, metadata={"help": "seed of all randomness"})

    def __post_init__(self) -> None:
        check_types(type(self), vars(self))
        if self.rounds < 1:
            raise CoterieError(f"rounds must be at least 1, not {self.rounds}")
        if not 0 < self.join_ratio <= 1:
            raise CoterieError(f"the join ratio must be above 0 and at most 1, not {self.join_ratio}")
        if not isinstance(self.new_clients, str) and not 0 <= self.new_clients < 1:
            raise CoterieError(
                f"new_clients must be a share, at least 0 and below 1, or names of clients, not {self.new_clients}"
            )
        if self.evaluate_every < 1:
            raise CoterieError(f"rounds between measurements must be at least 1, not {self.evaluate_every}")
        if not 0 <= self.seed < MAX_SEED:
            raise CoterieError(f"the seed must be at least 0 and below {MAX_SEED}, not {self.seed}")
        for name, factor in (("decay", self.lr_decay), *((f"factor from round {at} on", f) for at, f in self.lr_steps)):
            if not 0 <= factor < math.inf:
                raise CoterieError(f"the learning rate's {name} must be at least 0 and finite, not {factor}")

    def rate(self, round: int) -> float:
        """Factor on the learning rate in round 0, 1, ..."""
        steps = [factor for start, factor in sorted(self.lr_steps) if round >= start]
        return self.lr_decay**round * (steps[-1] if steps else 1.0)

    def joining(self, clients: int) -> int:
        """Participants of a round, of so many clients."""
        return max(int(self.join_ratio * clients + 1e-9), 1)


@dataclass(frozen=True)
class Safety:
    """Checkpoints, and the limits beyond which a round fails. They do not change results."""

    checkpoint_every: int = field(
        default=1, metadata={"help": "rounds between checkpoints, from which `coterie resume` continues; 0: none"}
    )
    keep_state: bool = field(
        default=True, metadata={"help": "keep the last checkpoint of a finished run, so that it can be extended"}
    )
    max_left_out: float = field(
        default=0.5,
        metadata={"help": "share of a round's clients that may be left out (no answer, or an unusable one)"},
    )
    max_magnitude: float = field(
        default=ranges.LIMIT, metadata={"help": "largest magnitude in an update; a client that exceeds it is left out"}
    )

    def __post_init__(self) -> None:
        check_types(type(self), vars(self))
        if self.checkpoint_every < 0:
            raise CoterieError(f"rounds between checkpoints must be at least 0, not {self.checkpoint_every}")
        if not 0 <= self.max_left_out <= 1:
            raise CoterieError(f"the share that may be left out must be between 0 and 1, not {self.max_left_out}")
        if not 0 < self.max_magnitude < math.inf:
            raise CoterieError(f"max-magnitude must be a finite number above 0, not {self.max_magnitude}")
