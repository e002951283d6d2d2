"""Noise on the class statistics that a client sends: prototypes, moments, variance, counts.

Features are clipped to the norm c first. All statistics are computed from sums over the client's n samples. One sample
of class k contributes

    to the counts n_k                          1
    to the sums Σ z of its class               at most c   (for prototypes and for moments, with different encoders)
    to the sum Σ ||z||²                        at most c²

so the vector (n_k, Σz/c, Σz'/c, Σ||z||²/c²), with as many parts as the method sends, changes by at most √parts if the
sample is removed. Noise of standard deviation z √parts on each number is one Gaussian mechanism of multiplier z. The
messages are computed from the noisy sums, at no further cost. n is assumed to be public.

The guarantee is for a given encoder, which FedPAC's clients send too. Only --dp sample adds noise to weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.core import random
from coterie.core.batch import Data
from coterie.core.model import Model
from coterie.core.tree import Live, Tree
from coterie.core.wrapper import Around
from coterie.privacy.noise import Noise, SecretNoise, check_range, lattice_step, on_lattice
from coterie.privacy.updates import STATISTICS


@dataclass(frozen=True)
class StatisticsNoise(Around):
    noise: float = field(kw_only=True)  # z
    bound: float = field(kw_only=True)  # c
    source: Noise = field(kw_only=True)

    def client_train(self, model: Model, state: Any, down: Any, data: Data) -> tuple[Any, Any]:
        seen: list[Tensor] = []  # features of all samples, once per computation
        secret = isinstance(self.source, SecretNoise)
        tight = clipping(model, self.bound, seen.append) if secret else clipping(model, self.bound)
        state, up = self.inner.client_train(tight, state, down, data)
        exact = {name: getattr(up, name) for name in sorted(STATISTICS & set(up._fields))}
        if isinstance(self.source, SecretNoise):
            sums = self.secret_sums(exact, torch.cat(seen), data, self.source)
        else:
            sums = self.reproducible_sums(exact, data)
        return state, up._replace(**self.from_sums(sums, data.samples, exact))

    def deviation(self, exact: dict[str, Tensor]) -> float:
        """Standard deviation of the noise, in units of one sample's contribution to a part."""
        return self.noise * math.sqrt(len(exact))

    def reproducible_sums(self, exact: dict[str, Tensor], data: Data) -> Sums:
        n, counts, deviation = data.samples, exact["counts"], self.deviation(exact)
        key = random.derive(data.key, random.NOISE, -1)

        def blurred(number: int, total: Tensor, unit: float) -> Tensor:
            return total + deviation * unit * random.normal(random.derive(key, number), total)

        present = blurred(0, counts, 1.0)
        means = blurred(1, counts[:, None] * exact["prototypes"], self.bound)
        if "moments" not in exact:
            return Sums(present, means)
        moments, variance = exact["moments"], exact["variance"]  # h = Σz / n by class, v = (Σ||z||²/n - ||h||²) / n
        squares = n * (n * variance + moments.square().sum())
        return Sums(present, means, blurred(2, n * moments, self.bound), blurred(3, squares, self.bound**2))

    def secret_sums(self, exact: dict[str, Tensor], seen: Tensor, data: Data, source: SecretNoise) -> Sums:
        """Sums of the features, row by row: a float sum may change by more than one sample's contribution.

        seen: (n, d) per computation of all features, first with the received encoder and last with the trained one.
        """
        n, deviation, dtype = len(data.y), self.deviation(exact), data.rate.dtype
        before, after = seen[:n].double(), seen[-n:].double()
        member = F.one_hot(data.y, data.classes)  # (n, K)
        check_seen(after, member, exact["prototypes"])

        def noisy(rows: Tensor, unit: float) -> Tensor:
            """Noisy sum of rows (n, ...) of norm at most `unit`: by class, or in total if a row is one number."""
            step = lattice_step(deviation * unit)
            check_range(n * unit / step, self.noise)
            whole = on_lattice({"": rows}, unit, step)[""]
            total = whole.long().sum(0) if rows.ndim == 1 else by_class(whole.long(), data.y, data.classes)
            return source.noisy(total, step).to(dtype)

        ones = torch.ones(n, 1, dtype=torch.float64)
        present, means = noisy(ones, 1.0)[:, 0], noisy(after, self.bound)
        if "moments" not in exact:
            return Sums(present, means)
        squares = within(before, self.bound).square().sum(1)
        return Sums(present, means, noisy(before, self.bound), noisy(squares, self.bound**2))

    def from_sums(self, sums: Sums, n: Tensor, exact: dict[str, Tensor]) -> dict[str, Tensor]:
        """The messages, which depend only on the noisy sums and n."""
        present = sums.counts.clamp_min(0)  # (K,)
        made = {"counts": present * n / present.sum().clamp_min(1e-12) + 1e-6 * n / len(present)}
        made["prototypes"] = within(sums.prototypes / present.clamp_min(1)[:, None], self.bound)
        if sums.moments is not None and sums.squares is not None:
            made["moments"] = sums.moments / n
            longer = sums.moments.numel() * (self.deviation(exact) * self.bound / n) ** 2  # noise in ||h||²
            spread = sums.squares / n - (made["moments"].square().sum() - longer)
            made["variance"] = spread.clamp_min(0) / n
        return made


class Sums(NamedTuple):
    """Noisy sums over a client's samples."""

    counts: Tensor  # (K,)
    prototypes: Tensor  # (K, d) Σz
    moments: Tensor | None = None  # (K, d) Σz, of the encoder before training
    squares: Tensor | None = None  # () Σ||z||²


def by_class(rows: Tensor, y: Tensor, classes: int) -> Tensor:
    """(K, d) sums of integer rows (n, d)."""
    return rows.new_zeros(classes, rows.shape[1]).index_add_(0, y, rows)


def check_seen(rows: Tensor, member: Tensor, prototypes: Tensor) -> None:
    """Check that the recorded features are those of the method's prototypes."""
    means = (member.double().T @ rows) / member.sum(0).clamp_min(1)[:, None]
    if rows.shape[0] != len(member) or not torch.allclose(means, prototypes.double(), rtol=1e-3, atol=1e-4):
        raise ValueError("the method's prototypes are not the class means of the features that it computed last")


def within(z: Tensor, bound: float) -> Tensor:
    """Clip rows to the bound."""
    return z * (bound / z.square().sum(1, keepdim=True).sqrt().clamp_min(1e-12)).clamp_max(1)


def clipping(model: Model, bound: float, note: Callable[[Tensor], None] = lambda z: None) -> Model:
    """A copy of the model that clips and records features outside of training, from which statistics are computed."""

    class Clipping(type(model)):  # type: ignore[misc]
        def features(self, encoder: Tree, x: Tensor) -> Tensor:
            z: Tensor = super().features(encoder, x)
            if isinstance(encoder, Live):
                return z
            z = within(z, bound)
            note(z)
            return z

    made: Model = Clipping(**{f.name: getattr(model, f.name) for f in fields(model)})
    return made
