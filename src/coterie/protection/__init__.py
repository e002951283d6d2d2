"""Protection around any method: robust aggregation, and differential privacy with its accountant.

Each is a method around a method (core/around.py), so no method knows of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from coterie.core import order
from coterie.core.errors import CoterieError, unknown
from coterie.core.method import Method
from coterie.core.model import Model
from coterie.protection import refusals
from coterie.protection.accountant import Spent, epsilon
from coterie.protection.client_noise import ClientNoise
from coterie.protection.private_sgd import CUT, SampleNoise, check_network, uses
from coterie.protection.robust import Robust
from coterie.protection.statistics_noise import StatisticsNoise

AnyMethod = Method[Any, Any, Any, Any]
ROBUST = {"clip": refusals.ROBUST, "trimmed": refusals.TRIMMED, "median": refusals.MEDIAN}
LEVELS = ("client", "sample")


@dataclass(frozen=True)
class Protection:
    """What a run is protected against: clients that send nonsense, and those who look at what clients send."""

    robust: str | None = field(
        default=None, metadata={"help": "robust aggregation: clip, trimmed or median of what clients send"}
    )
    robust_norm: float | None = field(
        default=None, metadata={"help": "largest norm of an update, for clip; the median of all if not set"}
    )
    robust_share: float = field(
        default=0.2, metadata={"help": "share of the clients that are pulled in from either end, for trimmed"}
    )
    dp: str | None = field(
        default=None, metadata={"help": "differential privacy of a whole client, or of each sample: client or sample"}
    )
    dp_clip: float = field(default=1.0, metadata={"help": "largest norm of an update, or of a sample's gradient (C)"})
    dp_noise: float = field(default=1.0, metadata={"help": "deviation of the noise, in units of that norm (z)"})
    dp_delta: float = field(default=1e-5, metadata={"help": "chance that the guarantee may fail (δ)"})
    dp_statistics: float | None = field(
        default=None, metadata={"help": "noise on class statistics, in units of what one sample contributes"}
    )
    dp_statistics_clip: float = field(
        default=10.0, metadata={"help": "largest norm of the features that statistics are made of"}
    )

    def __post_init__(self) -> None:
        if self.robust is not None and self.robust not in ROBUST:
            raise unknown("robust aggregation", self.robust, ROBUST)
        if self.dp is not None and self.dp not in LEVELS:
            raise unknown("level of differential privacy", self.dp, LEVELS)
        for name in ("robust_norm", "dp_clip", "dp_noise", "dp_statistics", "dp_statistics_clip"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise CoterieError(f"{name.replace('_', '-')} must be a number above 0, not {value}")
        if not 0 < self.robust_share < 0.5:
            raise CoterieError(f"robust-share must be above 0 and below 0.5, not {self.robust_share}")
        if not 0 < self.dp_delta < 1:
            raise CoterieError(f"dp-delta must be above 0 and below 1, not {self.dp_delta}")
        if self.robust and self.dp == "client":
            raise CoterieError(
                "--robust and --dp client do not go together: what one client sends would change what is kept of the "
                "others, which the noise is not made for; --dp client bounds every client's influence by itself"
            )

    @property
    def private(self) -> bool:
        """Whether there is noise."""
        return self.dp is not None or self.dp_statistics is not None

    def check(self, method: AnyMethod) -> None:
        """An error if this method cannot have it."""
        for asked, reason in self._reasons(method):
            if reason is not None:
                raise CoterieError(f"{method.title} cannot have {asked}: {reason}")

    def _reasons(self, method: AnyMethod) -> list[tuple[str, str | None]]:
        sample, statistics, doubt = self.dp == "sample", self.dp_statistics is not None, refusals.NOT_CHECKED
        found = []
        if self.robust:
            found.append((f"--robust {self.robust}", refusals.verdict(ROBUST[self.robust], method, None)))
        if self.dp == "client":
            found.append(("--dp client", refusals.verdict(refusals.CLIENT, method, doubt)))
        if statistics:
            rules = refusals.WITH_STATISTICS if sample else refusals.STATISTICS
            asked = "--dp sample with --dp-statistics" if sample else "--dp-statistics"
            found.append((asked, refusals.verdict(rules, method, refusals.NO_STATISTICS)))
        elif sample:
            found.append(("--dp sample", refusals.verdict(refusals.SAMPLE, method, doubt)))
        return found

    def around(self, method: AnyMethod, model: Model, joining: int, seed: int, secret: int | None = None) -> AnyMethod:
        """The method with all that is asked for; an error if it cannot have it. joining: clients in a round.

        secret: a number that only this server, or this device, knows: noise is drawn from it. A simulation has none.
        """
        self.check(method)
        if self.dp == "sample":
            check_network(model)
            method = SampleNoise(inner=method, noise=self.dp_noise, bound=self.dp_clip, secret=secret)
        if self.dp_statistics is not None:
            method = StatisticsNoise(
                inner=method, noise=self.dp_statistics, bound=self.dp_statistics_clip, secret=secret
            )
        if self.robust:
            method = Robust(inner=method, how=self.robust, norm=self.robust_norm, share=self.robust_share)
        if self.dp == "client":
            drawn = seed if secret is None else secret
            method = ClientNoise(inner=method, noise=self.dp_noise, bound=self.dp_clip, joining=joining, seed=drawn)
        return method

    def guarantee(
        self, method: AnyMethod, model: Model, x: Tensor, sizes: Sequence[int], rounds: Sequence[int], again: bool
    ) -> dict[str, Any]:
        """What differential privacy comes to in a whole run.

        method: without protection. x: (1, ...) any sample. sizes: training samples of each client; rounds: how often
        each takes part. again: whether all train once more after the last round.
        """
        if self.dp == "client":
            spent = [Spent(max(rounds), self.dp_noise)]
            return told("client", "the server's state, and all that clients are sent", spent, self.dp_delta)
        if self.dp == "sample":
            covers = "all that a client sends, and its personal model"
            trained, finished = (uses(method, model, x, train) for train in (True, False))
        else:
            covers = "the class statistics that a client sends, given its weights, which get no noise"
            trained, finished = [], []

        def one(size: int, times: int) -> dict[str, Any]:
            """Of a client with so many samples, which takes part so often."""
            steps = size // method.train.batch if method.train.drop_last else -(-size // method.train.batch)
            chance, times = min(method.train.batch / max(size, 1), 1), times + again
            epochs = [(times * steps, used) for used in trained] + [(steps, used) for used in finished]
            spent = [Spent(count, self.dp_noise / math.sqrt(max(used, 1)), chance) for count, used in epochs]
            delta = self.dp_delta - CUT * sum(part.times for part in spent)
            if self.dp_statistics is not None:
                spent.append(Spent(times, self.dp_statistics))
            return told("sample", covers, merged(spent), delta)

        found = [one(*client) for client in set(zip(sizes, rounds, strict=True))]
        return max(found, key=lambda privacy: privacy["epsilon"]) | {"delta": self.dp_delta}


def merged(spent: Sequence[Spent]) -> list[Spent]:
    """Those of one kind together."""
    kinds = {(part.noise, part.chance): 0 for part in spent}
    for part in spent:
        kinds[part.noise, part.chance] += part.times
    return [Spent(times, *kind) for kind, times in kinds.items()]


def told(neighbour: str, covers: str, spent: Sequence[Spent], delta: float) -> dict[str, Any]:
    return {"epsilon": epsilon(spent, delta), "delta": delta, "neighbour": f"one {neighbour}", "covers": covers}


def taken_part(seed: int, rounds: int, clients: int, joining: int) -> list[int]:
    """In how many rounds each client takes part."""
    counts = torch.zeros(clients, dtype=torch.int64)
    for number in range(rounds):
        counts[order.participants(seed, number, clients, joining)] += 1
    return [int(count) for count in counts]
