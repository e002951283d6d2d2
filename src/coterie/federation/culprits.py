"""Find the clients whose updates the server cannot use, and continue without them.

Updates that are out of range are excluded earlier. This handles updates with which `server_receive` raises an exception
or the server's state overflows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from coterie.core import ranges, tree
from coterie.core.errors import CoterieError, Diverged, out_of_memory, some_of
from coterie.execution import Answers

log = logging.getLogger("coterie")
Receive = Callable[[Answers], Any]  # returns the server's next state


class NotFinite(Exception):
    """The server's next state is not finite; the message names the fields."""


def received(answers: Answers, receive: Receive, number: int, max_left_out: float) -> tuple[Answers, Any]:
    """The answers that the server can use together, and its next state, which is finite."""
    try:
        return answers, attempt(answers, receive)
    except Exception as error:
        if out_of_memory(error):
            raise
        kept, after = largest_usable(answers, receive)
        if after is None:
            raise explained(error, number) from error
        reason = error
    culprits = sorted(set(answers.clients.tolist()) - set(kept.clients.tolist()))
    for client in culprits:
        log.warning("round %d: client %d is left out, the server cannot use its update: %s",
                    number, client, in_words(reason))  # fmt: skip
    out = len(kept.left_out) + len(kept.silent)
    selected = out + len(kept.clients)
    if out > max_left_out * selected:
        raise CoterieError(
            f"round {number}: {out} of {selected} clients are left out, more than the share of {max_left_out:g} that "
            f"may be (--max-left-out); the server cannot use the updates of clients {', '.join(map(str, culprits))}: "
            f"{in_words(reason)}"
        ) from reason
    return kept, after


def attempt(answers: Answers, receive: Receive) -> Any:
    after = receive(answers)
    if not bool(ranges.finite(after)):
        raise NotFinite(some_of(tree.not_finite(tree.flatten(after))))
    return after


def largest_usable(answers: Answers, receive: Receive) -> tuple[Answers, Any]:
    """As many answers as the server can use together, and its next state; None if it can use none.

    Groups of clients are added, the least suspicious first, and halved where that fails: one culprit among S clients
    takes about 2 log2(S) attempts.
    """
    kept: list[int] = []
    best: tuple[Answers, Any] = (answers, None)

    def add(group: list[int]) -> None:
        nonlocal kept, best
        candidate = without(answers, sorted([*kept, *group]))
        try:
            best = candidate, attempt(candidate, receive)
            kept = [*kept, *group]
        except Exception as error:
            if out_of_memory(error):
                raise
            if len(group) > 1:
                halves(group)

    def halves(group: list[int]) -> None:
        middle = (len(group) + 1) // 2
        add(group[:middle])
        add(group[middle:])

    ordered = suspicion(answers.ups, len(answers.clients)).argsort(stable=True).tolist()
    if len(ordered) > 1:
        halves(ordered)
    return best


def without(answers: Answers, rows: list[int]) -> Answers:
    """Keep these rows only; the other clients are left out."""
    ids = answers.clients.tolist()
    out = tuple(sorted((*answers.left_out, *(ids[row] for row in range(len(ids)) if row not in rows))))
    picked = torch.tensor(rows)
    where = next((t.device for t in tree.leaves(answers.ups)), picked.device)
    return Answers(answers.clients[picked], tree.pick(answers.ups, picked.to(where)), out, answers.silent)


def suspicion(ups: Any, count: int) -> Tensor:
    """(S,): the largest ratio of a client's magnitude to the median over clients, over all fields."""
    found = torch.ones(count, dtype=torch.float64)
    for t in tree.leaves(ups):
        if t.numel():
            size = t.detach().cpu().double().abs().flatten(1).amax(1) if t.ndim > 1 else t.detach().cpu().double().abs()
            found = torch.maximum(found, size / size.median().clamp_min(1e-30))
    return found


def explained(error: Exception, number: int) -> Exception:
    """The error for a round in which no client's update can be used."""
    if isinstance(error, NotFinite):
        return Diverged(
            f"round {number}: the server's state is not finite ({error}) with any client's update, so training "
            "diverged; try a smaller learning rate"
        )
    if isinstance(error, ValueError):  # such as a negative variance
        return CoterieError(
            f"round {number}: the server cannot use what clients sent: {error}. If clients may send invalid updates, "
            "try --robust clip"
        )
    return error


def in_words(error: Exception) -> str:
    if isinstance(error, NotFinite):
        return f"its next state would not be finite ({error})"
    return str(error) if isinstance(error, CoterieError) else f"{type(error).__name__}: {error}"
