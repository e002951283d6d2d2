"""Which clients are computed side by side: those of like size, so that little of the work is padding."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from coterie.clients.base import AnyMethod, Cohort, Job, cohort_of, slices
from coterie.core.model import Model
from coterie.core.samples import FederatedData, Split

SPLITS = ("train", "test", "validation")
WASTE = 0.15  # share of the steps that may be padding


def ladder(steps: Iterable[int]) -> list[int]:
    """The fewest lengths such that every client is padded to one of them and wastes at most 15 % of its steps.

    From the longest down: a rung serves all clients that are not too short for it. It depends on all clients, not
    on those who take part, so the same lengths come back in every round.
    """
    rungs: list[int] = []
    for length in sorted(set(steps), reverse=True):
        if not rungs or length < (1 - WASTE) * rungs[-1]:
            rungs.append(length)
    return rungs[::-1]


def cut(steps: Sequence[int], rungs: Sequence[int]) -> list[int]:
    """Ascending, the rungs that cohorts are padded to: the fewest with which these clients waste at most 15 %.

    Exact, by dynamic programming over the rungs in use: with k cohorts, the least padded work of the clients up to
    each rung. Among cuts into equally many cohorts it is the one with the least waste. One cohort for each rung
    always is good enough, so there is an answer.
    """
    counts = sorted(Counter(rungs[bisect_left(rungs, own)] for own in steps).items())  # (rung, clients on it)
    below = [0, *accumulate(count for _, count in counts)]  # clients on the first j rungs
    work: dict[int, tuple[int, list[int]]] = {0: (0, [])}  # rungs dealt with -> padded steps, where cohorts end
    while True:
        after: dict[int, tuple[int, list[int]]] = {}
        for done, (spent, ends) in work.items():
            for j in range(done + 1, len(counts) + 1):
                total = spent + (below[j] - below[done]) * counts[j - 1][0]
                if j not in after or total < after[j][0]:
                    after[j] = total, [*ends, counts[j - 1][0]]
        spent, ends = after[len(counts)]
        if (1 - WASTE) * spent <= sum(steps) or len(ends) == len(counts):
            return ends
        work = after


class Lengths:
    """To which lengths the clients of a split are padded."""

    def __init__(self, sizes: Sequence[int], batch: int = 1, drop_last: bool = False) -> None:
        self.batch, self.drop_last = batch, drop_last
        self.rungs = ladder(map(self.steps, sizes))
        self.sizes: dict[int, set[int]] = {rung: set() for rung in self.rungs}  # of all clients on it
        for size in sizes:
            self.sizes[self.rung(size)].add(size)

    def steps(self, size: int) -> int:
        """Of one epoch, at least one."""
        return max(size // self.batch if self.drop_last else -(-size // self.batch), 1)

    def rung(self, size: int) -> int:
        return self.rungs[bisect_left(self.rungs, self.steps(size))]

    def length(self, rung: int) -> int:
        """Samples that a client on this rung is padded to: whole batches, but none if all on it are of one size."""
        if len(self.sizes[rung]) == 1:
            return max(*self.sizes[rung], 1)
        return rung * self.batch + (self.batch - 1 if self.drop_last else 0)

    def groups(self, sizes: Sequence[int]) -> list[tuple[int, list[int]]]:
        """Length, and the rows of the clients that are padded to it."""
        ends = cut([self.steps(size) for size in sizes], self.rungs)
        groups: dict[int, list[int]] = {end: [] for end in ends}
        for row, size in enumerate(sizes):
            groups[ends[bisect_left(ends, self.rung(size))]].append(row)
        return [(self.length(end), rows) for end, rows in groups.items()]


def of_one_size(sizes: Sequence[int]) -> list[tuple[int, list[int]]]:
    """The same without padding: clients of one size only."""
    return [(max(size, 1), [row for row, own in enumerate(sizes) if own == size]) for size in sorted(set(sizes))]


class Cutter:
    """Cuts clients into cohorts: of like size, or of the same where the network has a layer that minds padding."""

    def __init__(self, method: AnyMethod, model: Model, data: FederatedData) -> None:
        self.data, self.exact, self.by_batch = data, model.minds_padding, model.tests_by_batch
        held = {name: split for name in SPLITS if (split := getattr(data, name)) is not None}
        self.lengths = {name: Lengths(split.sizes) for name, split in held.items()}
        self.lengths["train"] = Lengths(data.train.sizes, method.train.batch, method.train.drop_last)

    def __call__(self, job: Job, clients: Tensor, limit: int, device: torch.device) -> list[Cohort]:
        """None with more than `limit` clients."""
        if job.task == "score_global" and not self.by_batch:  # all samples of all clients in few large passes
            return [cohort_of(clients, torch.arange(len(clients)), device)]
        split: Split = getattr(self.data, job.split)
        sizes = [split.sizes[client] for client in clients.tolist()]
        cohorts = []
        for length, group in (of_one_size if self.exact else self.lengths[job.split].groups)(sizes):
            even = -(-len(group) // -(-len(group) // limit))
            group.sort(key=sizes.__getitem__)
            parts = (sorted(group[part]) for part in slices(len(group), even))
            cohorts += [self._cohort(job, clients, rows, length, device) for rows in parts]
        return cohorts

    def _cohort(self, job: Job, clients: Tensor, rows: list[int], length: int, device: torch.device) -> Cohort:
        steps, held = self.lengths[job.split].steps, getattr(self.data, job.split).sizes
        sizes = [held[client] for client in clients[rows].tolist()]
        work = sum(map(steps, sizes)), steps(length) * len(rows)
        return cohort_of(clients, torch.tensor(rows), device, length, min(sizes) < length, *work)
