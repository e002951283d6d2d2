"""Learning-rate schedules: a factor on the learning rate, from the round and the local step.

One notation everywhere: shapes joined by `+`, each with its numbers after colons, such as `warmup:5+cosine:0.01`. A
shape runs over the rounds; with `local-` in front it runs over a client's steps within a round, and starts again in
every round. The factors of both are multiplied.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from coterie.core.errors import CoterieError, unknown

LOCAL = "local-"  # prefix of shapes over local steps
SHAPES = {  # name -> its form, in messages
    "constant": "constant",
    "steps": "steps:START=FACTOR:START=FACTOR",
    "exponential": "exponential:FACTOR",
    "cosine": "cosine or cosine:LAST",
    "linear": "linear or linear:LAST",
    "warmup": "warmup:COUNT",
}
FORMS = "constant, steps:50=0.2:75=0.02, exponential:0.99, cosine:0.01, linear:0.1, warmup:5+cosine, local-cosine"


class Shape(NamedTuple):
    """The factor over t = 0, 1, ..., of `total`."""

    name: str = "constant"
    value: float = 0.0  # exponential: factor per unit; cosine and linear: the factor that they approach
    starts: tuple[tuple[int, float], ...] = ()  # steps: factors from these t on
    warmup: int = 0  # the factor rises over this many t; cosine, linear and exponential begin after them

    @property
    def spans(self) -> bool:
        """Whether the factor depends on the total."""
        return self.name in ("cosine", "linear")

    @property
    def varies(self) -> bool:
        return self.name != "constant" or self.warmup > 0

    def factor(self, t: Tensor, total: Tensor) -> Tensor:
        """In the shape of t, in float64."""
        t, total = t.double(), total.double()
        later, found = (t - self.warmup).clamp_min(0), torch.ones_like(t)
        part = torch.minimum(later, total - self.warmup - 1).clamp_min(0) / (total - self.warmup).clamp_min(1)
        if self.name == "exponential":
            found = self.value**later
        elif self.name == "cosine":
            found = self.value + (1 - self.value) * (1 + torch.cos(math.pi * part)) / 2
        elif self.name == "linear":
            found = 1 + (self.value - 1) * part
        for start, value in self.starts:
            found = torch.where(t >= start, value, found)
        return torch.where(t < self.warmup, (t + 1) / self.warmup, found) if self.warmup else found


@dataclass(frozen=True)
class RateSchedule:
    rounds: Shape
    local: Shape

    def over_rounds(self, round: int, rounds: int) -> float:
        """The factors of rounds 0, 1, ... of `rounds`. Later rounds keep the last factor, except with steps and
        exponential, which continue."""
        return float(self.rounds.factor(torch.tensor(round), torch.tensor(rounds)))

    def over_steps(self, step: Tensor, steps: Tensor) -> Tensor:
        """The factors of local steps 0, 1, ... of `steps`, in float64."""
        return self.local.factor(step, steps)

    def factor(self, round: int, rounds: int, step: int, steps: int) -> float:
        """The factor on the learning rate."""
        return self.over_rounds(round, rounds) * float(self.over_steps(torch.tensor(step), torch.tensor(steps)))


@cache
def read_schedule(text: str) -> RateSchedule:
    """The schedule that a text describes."""
    found: dict[bool, dict[str, Shape]] = {False: {}, True: {}}
    for part in text.split("+"):
        name, *numbers = part.strip().split(":")
        local, name = name.startswith(LOCAL), name.removeprefix(LOCAL)
        if name not in SHAPES:
            raise unknown("schedule", name, SHAPES)
        kind = "warmup" if name == "warmup" else "shape"
        if kind in found[local]:
            where = "local steps" if local else "rounds"
            raise CoterieError(f"schedule '{text}' has two parts of the same kind over {where}; use one of them")
        found[local][kind] = read_shape(part.strip(), name, numbers)
    rounds, steps = (
        of.get("shape", Shape())._replace(warmup=of.get("warmup", Shape()).warmup) for of in (found[False], found[True])
    )
    return RateSchedule(rounds, steps)


def read_shape(part: str, name: str, numbers: list[str]) -> Shape:
    """One part of a schedule, such as exponential:0.9."""
    try:
        if name == "steps" and numbers:
            pairs = sorted((count(start), number(value)) for start, value in (pair.split("=") for pair in numbers))
            return Shape(name, starts=tuple(pairs))
        if name == "warmup":
            (given,) = numbers
            return Shape(warmup=count(given))
        if name == "exponential":
            (given,) = numbers
            return Shape(name, number(given))
        if name == "constant" and not numbers:
            return Shape()
        if name in ("cosine", "linear") and len(numbers) <= 1:
            return Shape(name, number(numbers[0]) if numbers else 0.0)
    except ValueError:
        pass
    raise CoterieError(
        f"schedule: '{part}' must have the form {SHAPES[name]}, with whole numbers for rounds and factors of at least 0"
    )


def count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError
    return value


def number(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise ValueError
    return value
