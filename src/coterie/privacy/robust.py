"""Robust aggregation: outlying updates are pulled toward the others before the server processes them.

Every client keeps its row, so the server of any method works unchanged.

clip: each client's update is clipped to a bound, or to the median norm of all clients, separately for each field of Up.
trimmed: per coordinate, the largest and smallest updates are replaced by the nearest remaining ones (winsorizing).
median: per coordinate, the median replaces every update.

One update replaces those of all clients, chosen or computed from all weights together; f of S clients may be malicious:

krum: the update with the smallest sum of squared distances to its S - f - 2 nearest ones. multi-krum: the mean of the
S - f updates with the smallest sums.
bulyan: krum chooses S - 2f updates, one after the other; per coordinate, the mean of the S - 4f values nearest to their
median.
geometric-median (RFA): the point with the smallest sum of distances, by smoothed Weiszfeld steps from the model that
was sent. Weights are sample counts, at most that of the median client.

Class statistics are clipped in every mode: clients send zeros for missing classes, which are not information.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from coterie.core import tree
from coterie.core.errors import CoterieError
from coterie.core.method import messages
from coterie.core.tree import Tree
from coterie.core.wrapper import Around
from coterie.privacy.updates import NOT_NEGATIVE, SIZES, STATISTICS, moved, moves, norms, scaled, shrink

PAPERS = {  # as in the docstrings of methods
    ("krum", "multi-krum"): "Peva Blanchard, El Mahdi {El Mhamdi}, Rachid Guerraoui, Julien Stainer: Machine Learning "
    "with Adversaries: Byzantine Tolerant Gradient Descent, NeurIPS 2017.",
    ("bulyan",): "El Mahdi {El Mhamdi}, Rachid Guerraoui, Sébastien Rouault: The Hidden Vulnerability of Distributed "
    "Learning in Byzantium, ICML 2018.",
    ("geometric-median",): "Krishna Pillutla, Sham M. Kakade, Zaid Harchaoui: Robust Aggregation for Federated "
    "Learning, IEEE TSP 2022.",
}
LIARS = {"krum": (2, 3), "multi-krum": (2, 3), "bulyan": (4, 3)}  # S must be at least a f + b
WEISZFELD_STEPS, SMALLEST = 100, 1e-6  # of the geometric median; the smallest distance to divide by (ν)


@dataclass(frozen=True)
class Robust(Around):
    how: str = field(default="clip", kw_only=True)
    norm: float | None = field(default=None, kw_only=True)  # bound of the fields that Down and Up share
    share: float = field(default=0.2, kw_only=True)  # of clients winsorized at either end, or assumed malicious

    def server_receive(self, server: Any, clients: Tensor, ups: Any) -> Any:
        downs, changes = messages(self.inner, server, clients), dict[str, Tensor]()
        joint: Tree = {}  # weights that are judged together
        for name, parts in moves(ups, downs).items():
            if name in NOT_NEGATIVE:
                parts = {key: t.clamp_min(0) for key, t in parts.items()}
            if self.how in ONE_FOR_ALL and name not in STATISTICS | SIZES:
                joint |= parts
            elif self.how == "clip" or name in STATISTICS:
                given = self.norm if name in downs._fields and name not in STATISTICS else None
                changes |= clipped(parts, given)
            else:
                changes |= {key: self.pulled(t) for key, t in parts.items()}
        changes |= self.replaced(joint, getattr(ups, "samples", None)) if joint else {}
        return self.inner.server_receive(server, clients, moved(ups, downs, changes))

    def replaced(self, parts: Tree, samples: Tensor | None) -> Tree:
        """One update in every row."""
        liars = lying(self.how, self.share, len(next(iter(parts.values()))))
        one = ONE_FOR_ALL[self.how](parts, samples, liars)
        return {name: one[name].expand_as(t) for name, t in parts.items()}

    def pulled(self, t: Tensor) -> Tensor:
        """(S, ...), each coordinate clamped to the range of the middle clients."""
        rows, middle = len(t), (len(t) - 1) // 2
        out = min(part_of(self.share, rows), middle) if self.how == "trimmed" else middle
        ordered = t.sort(0).values
        low, high = ordered[out], ordered[rows - 1 - out]
        return t.clamp(low, high) if self.how == "trimmed" else ((low + high) / 2).expand_as(t)


def clipped(parts: Tree, bound: float | None) -> Tree:
    """Clip rows to the bound, or to the median of their norms."""
    length = norms(parts)
    return scaled(parts, shrink(length, torch.quantile(length, 0.5) if bound is None else bound))


def part_of(share: float, clients: int) -> int:
    """The share of clients, rounded up: 7 for 0.28 of 25, which is 7.000000000000001 in floating point."""
    return math.ceil(round(share * clients, 9))


def lying(how: str, share: float, clients: int) -> int:
    """f: how many clients of a round may be malicious. Raises `CoterieError` if these are too many."""
    liars = part_of(share, clients)
    factor, more = LIARS.get(how, (0, 0))
    if clients < factor * liars + more:
        raise CoterieError(
            f"--robust {how} needs at least {factor}f + {more} clients in a round, where f may be malicious: with "
            f"--robust-share {share:g}, f is {liars} of {clients}, which needs {factor * liars + more}; let more "
            "clients join, lower --robust-share, or use --robust clip"
        )
    return liars


def gram(parts: Tree) -> Tensor:
    """(S, S) inner products of the updates."""
    rows = [t.reshape(len(t), -1).double() for t in parts.values()]
    return torch.stack([row @ row.T for row in rows]).sum(0)


def distances(products: Tensor) -> Tensor:
    """(S, S) squared distances, from inner products; infinite to oneself."""
    sizes = products.diagonal()
    squares = (sizes + sizes[:, None] - 2 * products).clamp_min(0)
    return squares + torch.diag(torch.full_like(sizes, torch.inf))


def scores(squares: Tensor, neighbors: int) -> Tensor:
    """(S,) sum of the squared distances to this many nearest others."""
    return squares.sort(1).values[:, :neighbors].sum(1)


def krum(parts: Tree, samples: Tensor | None, liars: int) -> Tree:
    squares = distances(gram(parts))
    best = scores(squares, len(squares) - liars - 2).argmin()
    return {name: t.index_select(0, best[None])[0] for name, t in parts.items()}


def multi_krum(parts: Tree, samples: Tensor | None, liars: int) -> Tree:
    squares = distances(gram(parts))
    best = scores(squares, len(squares) - liars - 2).argsort(stable=True)[: len(squares) - liars]
    return {name: t.index_select(0, best).mean(0) for name, t in parts.items()}


def bulyan(parts: Tree, samples: Tensor | None, liars: int) -> Tree:
    squares, chosen = distances(gram(parts)), list[Tensor]()
    left = torch.zeros_like(squares[0])  # infinite for those chosen already
    for size in range(len(squares), 2 * liars, -1):  # S - 2f times
        best = (scores(squares, max(size - liars - 2, 1)) + left).argmin()[None]
        left, squares = left.index_fill(0, best, torch.inf), squares.index_fill(1, best, torch.inf)
        chosen.append(best)
    picked, kept = torch.cat(chosen), len(squares) - 4 * liars

    def near_median(t: Tensor) -> Tensor:
        t = t.index_select(0, picked).sort(0).values
        middle = (t[(len(t) - 1) // 2] + t[len(t) // 2]) / 2
        nearest = (t - middle).abs().argsort(dim=0, stable=True)[:kept]
        return t.gather(0, nearest).mean(0)

    return {name: near_median(t) for name, t in parts.items()}


def geometric_median(parts: Tree, samples: Tensor | None, liars: int) -> Tree:
    products = gram(parts)
    weights = torch.ones_like(products[0])  # α
    if samples is not None:
        weights = samples.double().clamp_min(0).clamp_max(torch.quantile(samples.double(), 0.5))
    mixture = torch.zeros_like(weights)  # the median is a linear combination of the updates
    for _ in range(WEISZFELD_STEPS):
        across = products @ mixture
        away = (mixture @ across - 2 * across + products.diagonal()).clamp_min(0).sqrt()  # (S,)
        pull = weights / away.clamp_min(SMALLEST)
        mixture = pull / pull.sum()
    return tree.mix(parts, mixture)


ONE_FOR_ALL: dict[str, Callable[[Tree, Tensor | None, int], Tree]] = {
    "krum": krum,
    "multi-krum": multi_krum,
    "bulyan": bulyan,
    "geometric-median": geometric_median,
}
