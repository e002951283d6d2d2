"""What clients return from training."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.core import ranges, tree
from coterie.core.ranges import Known

NOT_FINITE = "its update is not finite"


class Answers(NamedTuple):
    """What the server can use of a round of training."""

    clients: Tensor  # (S,) ids of clients with a usable answer, ascending
    ups: Any  # one Up with a leading axis of S
    left_out: tuple[int, ...]  # ids of clients whose answer cannot be used; they keep their old state
    silent: tuple[int, ...] = ()  # ids of clients that did not answer; they keep their old state


class Returned(NamedTuple):
    """What clients returned, before any wait: only the device knows which answers can be used."""

    clients: Tensor  # (S,) all clients that answered
    ups: Any
    finite: Tensor  # (S,) whether the answer is finite and in the ranges that the method declares
    silent: tuple[int, ...] = ()
    known: Known | None = None  # what the ranges depend on

    def whole(self) -> Answers:
        """All answers, before any check."""
        return Answers(self.clients, self.ups, (), self.silent)

    def sift(self) -> Answers:
        """The usable answers. Waits for the device."""
        ok = self.finite.cpu()
        if bool(ok.all()):
            return self.whole()
        ups = tree.pick(self.ups, self.finite.nonzero()[:, 0])
        return Answers(self.clients[ok], ups, tuple(self.clients[~ok].tolist()), self.silent)

    def fault(self, client: int) -> str:
        """Why the answer of this client cannot be used."""
        row = (self.clients == client).nonzero()[0]
        if self.known is None:
            return NOT_FINITE
        up = tree.pick(self.ups, row.to(self.finite.device))
        found = ranges.fault(up, self.known._replace(samples=self.known.samples[row]))
        return NOT_FINITE if found is None or found.endswith("is not finite") else f"its update is refused: {found}"


def in_order(count: int, parts: Iterable[tuple[Tensor, Any]]) -> Any:
    """One tree of `count` rows from pairs of row numbers (C,) and rows (C, ...), each freed once it is copied."""
    whole: Any = None
    for rows, part in parts:
        if len(rows) == count:
            return part
        if whole is None:
            whole = tree.apply(lambda t: t.new_empty(count, *t.shape[1:]), part)
        tree.apply(lambda t, new, rows=rows: t.index_copy_(0, rows, new), whole, part)
    return whole


def rows_where(condition: Tensor, yes: Any, no: Any) -> Any:
    """Rows of `yes` where a condition (S,) holds, elsewhere of `no`."""
    return tree.apply(lambda a, b: torch.where(condition.view(-1, *[1] * (a.ndim - 1)), a, b), yes, no)
