"""Which clients are computed side by side, and how much of the work is padding."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import coterie
from coterie.api import make_network
from coterie.core import random, tree
from coterie.execution import Request, Stacked
from coterie.execution.cohorts import WASTE, Lengths, bucket_lengths, merge_buckets
from coterie.execution.requests import send
from coterie.execution.stacked import lean
from tests import toy

steps_of_all = st.lists(st.integers(1, 60), min_size=1, max_size=9)


@given(steps_of_all)
def test_on_the_ladder_nobody_wastes_more_than_its_share(steps: list[int]) -> None:
    """And no bucket lengths with fewer buckets does it: tried out, all of them."""
    buckets = bucket_lengths(steps)

    def serves(buckets: Any) -> bool:
        return all(any(own <= bucket and own >= (1 - WASTE) * bucket for bucket in buckets) for own in steps)

    assert serves(buckets)
    assert not any(serves(fewer) for fewer in itertools.combinations(sorted(set(steps)), len(buckets) - 1))


@settings(max_examples=200)
@given(steps_of_all, st.data())
def test_the_cut_is_the_best_there_is(everyone: list[int], data: st.DataObject) -> None:
    """Against all sets of buckets that end with the longest participant's."""
    steps = data.draw(st.lists(st.sampled_from(everyone), min_size=1))
    buckets = bucket_lengths(everyone)

    def padded(ends: Any) -> int:
        return sum(min((end for end in ends if end >= own), default=10**6) for own in steps)

    allowed = sum(steps) / (1 - WASTE)
    possible = [
        c for k in range(1, len(buckets) + 1) for c in itertools.combinations(buckets, k) if padded(c) <= allowed
    ]
    fewest = min(map(len, possible))
    found = merge_buckets(steps, buckets)
    assert len(found) == fewest
    assert padded(found) == min(padded(c) for c in possible if len(c) == fewest)


@given(st.lists(st.integers(0, 400), min_size=1), st.integers(1, 50), st.booleans())
def test_padding_adds_whole_batches_only(sizes: list[int], batch: int, drop_last: bool) -> None:
    """Everybody fits, and clients of one size get no padding at all."""
    lengths = Lengths(sizes, batch, drop_last)
    groups = lengths.groups(sizes)
    assert sorted(row for _, rows in groups for row in rows) == list(range(len(sizes)))
    for length, rows in groups:
        assert all(sizes[row] <= length for row in rows)
        ragged = len({sizes[row] for row in rows}) > 1
        assert not ragged or lengths.steps(length) in lengths.buckets
    alike = Lengths([37] * 5, batch, drop_last)
    assert alike.groups([37] * 3) == [(37, [0, 1, 2])]


@pytest.mark.parametrize("clients", [20, 100])
@pytest.mark.parametrize("join", [1.0, 0.3])
def test_waste_at_dirichlet(clients: int, join: float) -> None:
    """Counted here again, from sizes and shapes; at most 15 % in each of 20 rounds."""
    data = coterie.load_clients("fashion-mnist-small", partition="dirichlet", alpha=0.1, num_clients=clients)
    method = coterie.make_method("fedavg", batch_size=50)
    model = make_network("cnn", data, 0)
    stacked = Stacked(method, model, data, 0, cohort=clients)
    for number in range(20):
        joined = random.participants(0, number, clients, int(join * clients))
        cohorts = stacked.cohorts(Request("train"), joined)
        assert sorted(i for c in cohorts for i in c.clients.tolist()) == joined.tolist()
        own = sum(-(-data.train.sizes[i] // 50) for i in joined.tolist())
        done = sum(len(c.clients) * -(-c.length // 50) for c in cohorts)
        assert 1 - own / done <= 0.15


def test_cohorts_are_remembered_and_forgotten() -> None:
    clients = Stacked(toy.method("fedavg"), toy.model(), toy.toy(), 0)
    first = clients._cohorts(Request("train"), torch.tensor([0, 3]))
    assert clients._cohorts(Request("train"), torch.tensor([0, 3])) is first
    assert clients._cohorts(Request("score", "test"), torch.tensor([0, 3])) is not first
    for some in itertools.product([True, False], repeat=5):
        if any(some):
            clients._cohorts(Request("train"), torch.tensor(some).nonzero()[:, 0])
    assert len(clients.remembered) <= 16


def test_a_large_cohort_is_cut_evenly() -> None:
    data = toy.toy(train=(8,) * 9, test=(2,) * 9)
    clients = Stacked(toy.method("fedavg"), toy.model(), data, 0, cohort=4)
    cohorts = clients.cohorts(Request("train"), torch.arange(9))
    assert [len(c.clients) for c in cohorts] == [3, 3, 3]


def test_what_all_are_sent_alike_is_not_copied() -> None:
    """From the message of FedAvg to the vmap: one row, whoever is picked. BatchNorm's statistics are many."""
    method, model = toy.method("fedavg"), toy.model(batch_norm=True)
    server = method.server_init(model, Stacked(method, model, toy.toy(), 0).census)
    downs = send(method, server, torch.arange(5))
    picked = tree.pick(downs, torch.tensor([1, 4, 2]))
    for name, t in tree.items(picked):
        assert t.shape[0] == 3
        assert t.stride(0) == 0
        assert torch.equal(t, tree.flatten(downs)[name][:3])
    given, dims, form = lean(picked)
    for name, t in tree.items(given):
        statistic = name.endswith(("running_mean", "running_var"))
        assert t.shape == tree.flatten(picked)[name].shape[0 if statistic else 1 :]
    assert form.count("m") == 2
    assert dims.weights.head == {"weight": None, "bias": None}


def test_rows_that_only_look_alike_stay_apart() -> None:
    t = torch.arange(6.0).view(3, 2)
    assert torch.equal(tree.pick(t, torch.tensor([2, 0])), t[[2, 0]])
    same = t[:1].expand(3, 2)
    assert tree.pick(same, torch.tensor([True, False, True])).shape == (2, 2)
    assert tree.pick(same, 1).shape == (2,)


def test_a_cohort_that_does_not_fit_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until two clients side by side are few enough; what comes out is the same."""
    data, method = toy.toy(train=(16,) * 7, test=(3,) * 7), toy.method("fedper")
    expected, _ = toy.stacked(method, toy.model(), data)
    plain, calls = Stacked._run, []

    def small(self: Stacked, request: Request, cohort: Any, states: Any, downs: Any) -> Any:
        calls.append(len(cohort.clients))
        if len(cohort.clients) > 2:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return plain(self, request, cohort, states, downs)

    monkeypatch.setattr(Stacked, "_run", small)
    found, _ = toy.stacked(method, toy.model(), data)
    assert toy.distance(expected, found) < 1e-12
    assert calls[:3] == [7, 4, 2]
    assert max(calls[20:]) == 2


def test_one_client_that_does_not_fit_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Stacked, "_run", never)
    with pytest.raises(coterie.CoterieError, match="not even one client fits"):
        toy.stacked(toy.method("fedper"), toy.model(), toy.toy())
