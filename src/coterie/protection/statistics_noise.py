"""Noise on the class statistics that a client sends: prototypes, moments, variance, counts.

Features are clipped to the norm c before they are counted. Then all that travels comes from sums over the client's n
samples, and one sample, of class k, contributes

    to the counts n_k                          1
    to the sums Σ z of its class               at most c   (once for prototypes, once for moments: other encoders)
    to the sum Σ ||z||²                        at most c²

so that the vector (n_k, Σz/c, Σz'/c, Σ||z||²/c²), of as many parts as a method sends, changes by at most √parts if the
sample's place is empty. Noise of deviation z √parts on every number of it is one Gaussian mechanism of multiplier z.
What is sent is made from the noisy sums, which costs nothing more. n itself is taken to be known.

It is a statement for a given encoder, which FedPAC's clients send too. Weights get no noise here, but by --dp sample.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

from coterie.core import order
from coterie.core.around import Around
from coterie.core.local import Data
from coterie.core.model import Model
from coterie.core.tree import Live, Tree
from coterie.protection.updates import STATISTICS


@dataclass(frozen=True)
class StatisticsNoise(Around):
    noise: float = field(kw_only=True)  # z
    bound: float = field(kw_only=True)  # c
    secret: int | None = field(default=None, kw_only=True, repr=False)  # of a device: what its noise is drawn from too

    def client_train(self, model: Model, state: Any, down: Any, data: Data) -> tuple[Any, Any]:
        state, up = self.inner.client_train(clipping(model, self.bound), state, down, data)
        names = sorted(STATISTICS & set(up._fields))
        return state, up._replace(**self.noisy({name: getattr(up, name) for name in names}, data))

    def noisy(self, exact: dict[str, Tensor], data: Data) -> dict[str, Tensor]:
        n, counts = data.samples, exact["counts"]
        key = order.with_secret(order.fold(data.key, order.NOISE, -1), self.secret)
        deviation = self.noise * math.sqrt(len(exact))

        def blurred(number: int, total: Tensor, unit: float) -> Tensor:
            return total + deviation * unit * order.normal(order.fold(key, number), total)

        present = blurred(0, counts, 1.0).clamp_min(0)  # (K,)
        made = {"counts": present * n / present.sum().clamp_min(1e-12) + 1e-6 * n / len(counts)}
        sums = blurred(1, counts[:, None] * exact["prototypes"], self.bound)  # (K, d)
        made["prototypes"] = within(sums / present.clamp_min(1)[:, None], self.bound)
        if "moments" in exact:
            moments, variance = exact["moments"], exact["variance"]  # h = Σz / n by class, v = (Σ||z||²/n - ||h||²) / n
            squares = n * (n * variance + moments.square().sum())
            made["moments"] = blurred(2, n * moments, self.bound) / n
            longer = moments.numel() * (deviation * self.bound / n) ** 2  # so much does noise lengthen ||h||²
            spread = blurred(3, squares, self.bound**2) / n - (made["moments"].square().sum() - longer)
            made["variance"] = spread.clamp_min(0) / n
        return made


def within(z: Tensor, bound: float) -> Tensor:
    """Rows no longer than the bound."""
    return z * (bound / z.square().sum(1, keepdim=True).sqrt().clamp_min(1e-12)).clamp_max(1)


def clipping(model: Model, bound: float) -> Model:
    """The same, but features that are not under training are clipped: those that statistics are made of."""

    class Clipping(type(model)):  # type: ignore[misc]
        def features(self, encoder: Tree, x: Tensor) -> Tensor:
            z: Tensor = super().features(encoder, x)
            return z if isinstance(encoder, Live) else within(z, bound)

    made: Model = Clipping(**{f.name: getattr(model, f.name) for f in fields(model)})
    return made
