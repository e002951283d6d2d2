"""Robust aggregation, differential privacy and encryption, as wrappers around any method."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from coterie.core import random
from coterie.core.errors import CoterieError, unknown
from coterie.core.method import AnyMethod
from coterie.core.model import Model
from coterie.core.validation import check_fields
from coterie.core.wrapper import innermost
from coterie.privacy.accountant import ACCOUNTANTS, Spent, best_accountant, describe, epsilon
from coterie.privacy.client_noise import ClientNoise
from coterie.privacy.noise import Noise, ReproducibleNoise, SecretNoise
from coterie.privacy.private_sgd import CUT, SampleNoise, check_network, uses
from coterie.privacy.refusals import verdict
from coterie.privacy.robust import ONE_FOR_ALL, Robust, lying
from coterie.privacy.statistics_noise import StatisticsNoise

ROBUST = ("clip", "trimmed", "median", *ONE_FOR_ALL)
LEVELS = ("client", "sample")
REPRODUCIBLE = "drawn from the seed of a simulation: it gives no privacy"
SECRET = "drawn from the operating system's secure generator, on the machine that adds it"  # noqa: S105 - a sentence
FORM, FITTED = (
    "shape, classes and columns of the samples",
    "figures that --normalise auto, --missing or a regression fitted to samples",
)
SCORED = "accuracy and loss on each client's test samples, which devices report only with --tell-scores"
NOT_COVERED = {
    "client": ("what the server sees of each client before it adds noise", "accuracy and loss of each client", FORM),
    "sample": ("numbers of samples", SCORED, FITTED, FORM),
    "statistics": ("weights", "numbers of samples", "accuracy and loss of each client", FITTED, FORM),
}


@dataclass(frozen=True)
class Protection:
    """Protection against clients that send wrong updates, and against readers of what clients send."""

    robust: str | None = field(
        default=None, metadata={"help": f"robust aggregation of client updates: {', '.join(ROBUST)}"}
    )
    robust_norm: float | None = field(
        default=None,
        metadata={"help": "largest norm of an update, for clip (default: the median of all clients)", "above": 0},
    )
    robust_share: float = field(
        default=0.2,
        metadata={
            "help": "share of clients winsorized at either end (trimmed) or assumed malicious (krum, bulyan)",
            "above": 0,
            "below": 0.5,
        },
    )
    dp: str | None = field(default=None, metadata={"help": "differential privacy at the level of a client or a sample"})
    dp_clip: float = field(
        default=1.0, metadata={"help": "largest norm of an update, or of a sample's gradient (C)", "above": 0}
    )
    dp_noise: float = field(
        default=1.0, metadata={"help": "standard deviation of the noise, in units of dp-clip (z)", "above": 0}
    )
    dp_delta: float = field(
        default=1e-5, metadata={"help": "probability that the guarantee may fail (δ)", "above": 0, "below": 1}
    )
    dp_accountant: str | None = field(
        default=None,
        metadata={"help": "accountant of ε: pld (tighter, needs coterie[dp]; default if installed) or renyi"},
    )
    dp_statistics: float | None = field(
        default=None, metadata={"help": "noise on class statistics, in units of one sample's contribution", "above": 0}
    )
    dp_statistics_clip: float = field(
        default=10.0, metadata={"help": "largest norm of the features in class statistics", "above": 0}
    )

    def __post_init__(self) -> None:
        check_fields(type(self), vars(self))
        if self.robust is not None and self.robust not in ROBUST:
            raise unknown("robust aggregation", self.robust, ROBUST)
        if self.dp is not None and self.dp not in LEVELS:
            raise unknown("level of differential privacy", self.dp, LEVELS)
        if self.private and self.dp_accountant is None:
            object.__setattr__(self, "dp_accountant", best_accountant())  # recorded, so that a resumed run keeps it
        if self.dp_accountant not in (None, *ACCOUNTANTS):
            raise unknown("dp-accountant", self.dp_accountant, ACCOUNTANTS)
        if self.robust and self.dp == "client":
            raise CoterieError(
                "--robust and --dp client cannot be combined: one client's update would change the updates of "
                "others, which the noise does not cover; --dp client already bounds every client's influence"
            )

    @property
    def private(self) -> bool:
        """Whether noise is added."""
        return self.dp is not None or self.dp_statistics is not None

    def check(self, method: AnyMethod) -> None:
        """Raise `CoterieError` if this method does not support these protections."""
        for option, reason in self._reasons(method):
            if reason is not None:
                raise CoterieError(f"{method.title} does not support {option}: {reason}")

    def _reasons(self, method: AnyMethod) -> list[tuple[str, str | None]]:
        sample, statistics, options = self.dp == "sample", self.dp_statistics is not None, {}
        if self.robust:
            options[f"--robust {self.robust}"] = f"robust-{'median' if self.robust in ONE_FOR_ALL else self.robust}"
        if self.dp == "client":
            options["--dp client"] = "dp-client"
        if statistics:
            flags = "--dp sample with --dp-statistics" if sample else "--dp-statistics"
            options[flags] = "dp-both" if sample else "dp-statistics"
        elif sample:
            options["--dp sample"] = "dp-sample"
        return [(flags, verdict(kind, method)) for flags, kind in options.items()]

    def around(self, method: AnyMethod, model: Model, joining: int, seed: int) -> AnyMethod:
        """Wrap a method for a simulation, whose noise follows from the seed and gives no privacy.

        joining: clients per round. Raises `CoterieError` if the method does not support it.
        """
        return self._around(method, model, joining, seed, ReproducibleNoise())

    def deployed(
        self,
        method: AnyMethod,
        model: Model,
        joining: int,
        source: SecretNoise = SecretNoise(),  # noqa: B008
    ) -> AnyMethod:
        """Wrap a method for the server and devices of a federation, whose noise is secret and never repeated."""
        if not isinstance(source, SecretNoise):
            raise CoterieError(f"devices add SecretNoise only; {type(source).__name__} is predictable")
        return self._around(method, model, joining, 0, source)

    def _around(self, method: AnyMethod, model: Model, joining: int, seed: int, source: Noise) -> AnyMethod:
        self.check(innermost(method))
        if self.dp == "sample":
            check_network(model)
            method = SampleNoise(inner=method, noise=self.dp_noise, bound=self.dp_clip, source=source)
        if self.dp_statistics is not None:
            method = StatisticsNoise(
                inner=method, noise=self.dp_statistics, bound=self.dp_statistics_clip, source=source
            )
        if self.robust:
            lying(self.robust, self.robust_share, joining)
            method = Robust(inner=method, how=self.robust, norm=self.robust_norm, share=self.robust_share)
        if self.dp == "client":
            method = ClientNoise(
                inner=method, noise=self.dp_noise, bound=self.dp_clip, joining=joining, seed=seed, source=source
            )
        return method

    def answer_cost(self, method: AnyMethod, model: Model, x: Tensor, train: bool) -> Callable[[int], list[Spent]]:
        """The privacy cost of one training of a client, or of its final step, as a function of its sample count.

        method: without protection. x: (1, ...) any sample.
        """
        used = uses(method, model, x, train) if self.dp == "sample" else []
        batch = method.train.batch_size

        def cost(size: int) -> list[Spent]:
            steps, chance = size // batch if method.train.drop_last else -(-size // batch), min(batch / max(size, 1), 1)
            spent = [Spent(steps, self.dp_noise / math.sqrt(max(count, 1)), chance) for count in used]
            return [*spent, Spent(1, self.dp_statistics)] if train and self.dp_statistics is not None else spent

        return cost

    def guarantee(
        self, method: AnyMethod, model: Model, x: Tensor, sizes: Sequence[int], rounds: Sequence[int], again: bool
    ) -> dict[str, Any]:
        """The privacy statement of a whole run: the ε of its worst client, what it covers and what it does not.

        method: without protection. x: (1, ...) any sample. sizes: training samples of each client; rounds: how often
        each takes part. again: whether all train once more after the last round.
        """
        if self.dp == "client":
            neighbour, missing, covers = "client", "client", "the server's state and everything that it sends"
            costs = [([Spent(max(rounds), self.dp_noise)], self.dp_delta)]
        else:
            neighbour, missing = "sample", "sample" if self.dp == "sample" else "statistics"
            statistics = " and class statistics" if self.dp_statistics is not None else ""
            covers = f"the weights{statistics} that a client sends, and its personal model"
            if self.dp is None:
                covers = "the class statistics that a client sends, given its weights, which get no noise"
            costs = self._sample_costs(method, model, x, set(zip(sizes, rounds, strict=True)), again)
        assert self.dp_accountant is not None
        return {
            "epsilon": max(epsilon(spent, delta, self.dp_accountant) for spent, delta in costs),
            "delta": self.dp_delta,
            "accountant": describe([part for spent, _ in costs for part in spent], self.dp_accountant),
            "neighbour": f"one {neighbour}",
            "covers": covers,
            "not_covered": list(NOT_COVERED[missing]),
            "noise": REPRODUCIBLE,
        }

    def _sample_costs(
        self, method: AnyMethod, model: Model, x: Tensor, clients: set[tuple[int, int]], again: bool
    ) -> list[tuple[list[Spent], float]]:
        """Mechanisms of each client, given as (samples, rounds), and the δ that remains for them."""
        trained, finished = (self.answer_cost(method, model, x, train) for train in (True, False))
        costs = []
        for size, times in clients:
            spent = [part._replace(times=part.times * (times + again)) for part in trained(size)] + finished(size)
            costs.append((merged(spent), self.dp_delta - CUT * sum(part.times for part in spent)))
        return costs


def merged(spent: Sequence[Spent]) -> list[Spent]:
    """Group identical mechanisms."""
    kinds = {(part.noise, part.chance): 0 for part in spent}
    for part in spent:
        kinds[part.noise, part.chance] += part.times
    return [Spent(times, *kind) for kind, times in kinds.items()]


def taken_part(seed: int, rounds: int, clients: int, joining: int) -> list[int]:
    """Number of rounds that each client takes part in."""
    counts = torch.zeros(clients, dtype=torch.int64)
    for number in range(rounds):
        counts[random.participants(seed, number, clients, joining)] += 1
    return [int(count) for count in counts]
