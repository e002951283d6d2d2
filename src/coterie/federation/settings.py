"""The settings of a federation: rounds, participation, checkpoints and limits."""

from __future__ import annotations

from dataclasses import dataclass, field

from coterie.core import ranges
from coterie.core.batchnorm import AVERAGED, POLICIES, check_policy
from coterie.core.validation import Explicit, check_fields

MAX_SEED = 1 << 63  # seeds are below this


@dataclass(frozen=True)
class Settings(Explicit):
    """How a federation runs, independently of the method."""

    rounds: int = field(default=200, metadata={"help": "communication rounds", "short": ("gr",), "low": 1})
    join_ratio: float = field(
        default=1.0,
        metadata={"help": "share of clients that take part in a round", "short": ("jr",), "above": 0, "high": 1},
    )
    full_last_round: bool = field(
        default=False, metadata={"help": "after the last round all clients train once more and are evaluated"}
    )
    aggregate_last_round: bool = field(
        default=False, metadata={"help": "all clients take part in the last round, and the server takes their updates"}
    )
    new_clients: float | str = field(
        default=0.0,
        metadata={
            "help": "clients that do not train and join at the end: a share, or names such as s22,s23",
            "low": 0,
            "below": 1,
        },
    )
    evaluate_every: int = field(
        default=1, metadata={"help": "rounds between evaluations; the last round is always evaluated", "low": 1}
    )
    batchnorm: str = field(
        default=AVERAGED,
        metadata={"help": f"BatchNorm policy: {', '.join(POLICIES)}; local layers or statistics are not sent"},
    )
    seed: int = field(default=0, metadata={"help": "seed of all randomness", "low": 0, "below": MAX_SEED})

    def __post_init__(self) -> None:
        check_policy(self.batchnorm)

    def joining(self, num_clients: int, round: int | None = None) -> int:
        """The number of participants in round 0, 1, ..., or in an ordinary round."""
        if self.aggregate_last_round and round == self.rounds - 1:
            return num_clients
        return max(int(self.join_ratio * num_clients + 1e-9), 1)


@dataclass(frozen=True)
class Safety:
    """Checkpoints, and the limits beyond which a round fails. They do not change results."""

    checkpoint_every: int = field(
        default=1,
        metadata={"help": "rounds between checkpoints, from which `coterie resume` continues; 0: none", "low": 0},
    )
    keep_state: bool = field(
        default=True, metadata={"help": "keep the last checkpoint of a finished run, so that it can be extended"}
    )
    max_left_out: float = field(
        default=0.5,
        metadata={
            "help": "share of a round's clients that may be left out (no answer, or an unusable one)",
            "low": 0,
            "high": 1,
        },
    )
    max_magnitude: float = field(
        default=ranges.LIMIT,
        metadata={"help": "largest magnitude in an update; a client that exceeds it is left out", "above": 0},
    )

    def __post_init__(self) -> None:
        check_fields(type(self), vars(self))
