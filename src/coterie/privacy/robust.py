"""Robust aggregation: outlying updates are pulled toward the others before the server processes them.

Every client keeps its row, so the server of any method works unchanged.

clip: each client's update is clipped to a bound, or to the median norm of all clients, separately for each field of Up.
trimmed: per coordinate, the largest and smallest updates are replaced by the nearest remaining ones (winsorizing).
median: per coordinate, the median replaces every update.

Class statistics are clipped in every mode: clients send zeros for missing classes, which are not information.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from coterie.core.tree import Tree
from coterie.core.wrapper import Around
from coterie.privacy.updates import NOT_NEGATIVE, STATISTICS, moved, moves, norms, scaled, sent, shrink


@dataclass(frozen=True)
class Robust(Around):
    how: str = field(default="clip", kw_only=True)
    norm: float | None = field(default=None, kw_only=True)  # bound of the fields that Down and Up share
    share: float = field(default=0.2, kw_only=True)  # of clients winsorized at either end

    def server_receive(self, server: Any, clients: Tensor, ups: Any) -> Any:
        downs, changes = sent(self.inner, server, clients), dict[str, Tensor]()
        for name, parts in moves(ups, downs).items():
            if name in NOT_NEGATIVE:
                parts = {key: t.clamp_min(0) for key, t in parts.items()}
            if self.how == "clip" or name in STATISTICS:
                given = self.norm if name in downs._fields and name not in STATISTICS else None
                changes |= clipped(parts, given)
            else:
                changes |= {key: self.pulled(t) for key, t in parts.items()}
        return self.inner.server_receive(server, clients, moved(ups, downs, changes))

    def pulled(self, t: Tensor) -> Tensor:
        """(S, ...), each coordinate clamped to the range of the middle clients."""
        rows, middle = len(t), (len(t) - 1) // 2
        out = middle if self.how == "median" else min(math.ceil(self.share * rows), middle)
        ordered = t.sort(0).values
        low, high = ordered[out], ordered[rows - 1 - out]
        return ((low + high) / 2).expand_as(t) if self.how == "median" else t.clamp(low, high)


def clipped(parts: Tree, bound: float | None) -> Tree:
    """Clip rows to the bound, or to the median of their norms."""
    length = norms(parts)
    return scaled(parts, shrink(length, torch.quantile(length, 0.5) if bound is None else bound))
