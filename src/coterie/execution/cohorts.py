"""Group clients of similar size into cohorts that are stacked, so that little of the work is padding."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from coterie.core.data import FederatedData, Split
from coterie.core.method import AnyMethod
from coterie.core.model import Model
from coterie.execution.requests import Cohort, Request, cohort_of
from coterie.execution.scoring import slices

SPLITS = ("train", "test", "validation")
WASTE = 0.15  # share of the steps that may be padding
CPU_COHORT = 32  # clients of a cohort where the memory is not known
GPU_SHARE = 1 / 32  # of its memory, for everything that scales with the models of a cohort
COPIES = 6  # of a model, while a client trains: state before and after, message, update, gradient, momentum


def bucket_lengths(steps: Iterable[int]) -> list[int]:
    """The fewest bucket lengths such that padding every client to one of them wastes at most 15 % of its steps.

    Greedy from the longest: a bucket holds all clients that are not too short for it. The buckets depend on all
    clients, not on the participants, so every round uses the same lengths.
    """
    buckets: list[int] = []
    for length in sorted(set(steps), reverse=True):
        if not buckets or length < (1 - WASTE) * buckets[-1]:
            buckets.append(length)
    return buckets[::-1]


def merge_buckets(steps: Sequence[int], buckets: Sequence[int]) -> list[int]:
    """The fewest buckets, ascending, that these clients can be padded to with at most 15 % waste in total.

    Exact, by dynamic programming over the buckets in use: with k cohorts, the least padded work of the clients up to
    each bucket. Among solutions with equally many cohorts it has the least waste. One cohort per bucket always
    satisfies the limit.
    """
    counts = sorted(Counter(buckets[bisect_left(buckets, own)] for own in steps).items())  # (bucket, clients in it)
    below = [0, *accumulate(count for _, count in counts)]  # clients in the first j buckets
    work: dict[int, tuple[int, list[int]]] = {0: (0, [])}  # buckets covered -> padded steps, ends of cohorts
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
    """The lengths that the clients of a split are padded to."""

    def __init__(self, sizes: Sequence[int], batch: int = 1, drop_last: bool = False) -> None:
        self.batch, self.drop_last = batch, drop_last
        self.buckets = bucket_lengths(map(self.steps, sizes))
        self.sizes: dict[int, set[int]] = {bucket: set() for bucket in self.buckets}  # bucket -> sizes of its clients
        for size in sizes:
            self.sizes[self.bucket(size)].add(size)

    def steps(self, size: int) -> int:
        """Steps of one epoch, at least one."""
        return max(size // self.batch if self.drop_last else -(-size // self.batch), 1)

    def bucket(self, size: int) -> int:
        return self.buckets[bisect_left(self.buckets, self.steps(size))]

    def length(self, bucket: int) -> int:
        """Samples that clients of this bucket are padded to: whole batches, or their size if it is the same for all."""
        if len(self.sizes[bucket]) == 1:
            return max(*self.sizes[bucket], 1)
        return bucket * self.batch + (self.batch - 1 if self.drop_last else 0)

    def groups(self, sizes: Sequence[int]) -> list[tuple[int, list[int]]]:
        """Pairs of a length and the rows of the clients that are padded to it."""
        ends = merge_buckets([self.steps(size) for size in sizes], self.buckets)
        groups: dict[int, list[int]] = {end: [] for end in ends}
        for row, size in enumerate(sizes):
            groups[ends[bisect_left(ends, self.bucket(size))]].append(row)
        return [(self.length(end), rows) for end, rows in groups.items()]


def of_one_size(sizes: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Pairs of a size and the rows of the clients of exactly this size: groups without padding."""
    return [(max(size, 1), [row for row, own in enumerate(sizes) if own == size]) for size in sorted(set(sizes))]


class CohortPartition:
    """Partitions clients into cohorts of similar size, or of equal size if padding would change results."""

    def __init__(self, method: AnyMethod, model: Model, data: FederatedData) -> None:
        self.data, self.exact, self.by_client = data, model.minds_padding, model.tests_by_client
        held = {name: split for name in SPLITS if (split := getattr(data, name)) is not None}
        self.lengths = {name: Lengths(split.sizes) for name, split in held.items()}
        self.lengths["train"] = Lengths(data.train.sizes, method.train.batch_size, method.train.drop_last)

    def __call__(self, request: Request, clients: Tensor, limit: int, device: torch.device) -> list[Cohort]:
        """Cohorts of at most `limit` clients."""
        if request.action == "score_global" and not (self.by_client or request.every):  # a few large forward passes
            return [cohort_of(clients, torch.arange(len(clients)), device)]
        split: Split = getattr(self.data, request.split)
        sizes = [split.sizes[client] for client in clients.tolist()]
        cohorts = []
        for length, group in (of_one_size if self.exact else self.lengths[request.split].groups)(sizes):
            even = -(-len(group) // -(-len(group) // limit))
            group.sort(key=sizes.__getitem__)
            parts = (sorted(group[part]) for part in slices(len(group), even))
            for rows in parts:
                ragged = min(sizes[row] for row in rows) < length
                cohorts.append(cohort_of(clients, torch.tensor(rows), device, length, ragged))
        return cohorts


def largest_cohort(device: torch.device, burden: int) -> int:
    """Number of clients whose models fit into a share of the memory. burden: bytes of a model or a client state."""
    if device.type != "cuda":
        return CPU_COHORT
    return max(int(GPU_SHARE * memory(device) / (COPIES * max(burden, 1))), 1)


def memory(gpu: torch.device) -> int:
    """Bytes of GPU memory."""
    return torch.cuda.get_device_properties(gpu).total_memory
