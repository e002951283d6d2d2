"""Client-level differential privacy: the mean that the server sees, and that it sees nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from coterie.core import tree
from coterie.core.method import Census
from coterie.core.wrapper import lasting_server
from coterie.execution import Looped, Turn
from coterie.execution.requests import send
from coterie.privacy import Protection, taken_part
from coterie.privacy.accountant import exact_epsilon
from tests import toy


def one_round(name: str, noise: float, clip: float, seed: int = 0, zero: int | None = None) -> tuple[Any, Any, Any]:
    """Server before and after a round, and what clients sent. zero: whose moves are taken away."""
    model, data = toy.model(), toy.toy()
    inner = toy.method(name)
    method = Protection(dp="client", dp_noise=noise, dp_clip=clip).around(inner, model, joining=5, seed=seed)
    clients, everyone = Looped(method, model, data, 0, processes=1), torch.arange(5)
    server = method.server_init(model, clients.census)
    clients.join(method.server_welcome(server))
    downs = send(method, server, everyone)
    ups = clients.train(everyone, downs, Turn(0)).ups
    if zero is not None:
        still = tree.overlay(ups, downs)
        ups = tree.apply(lambda up, down: torch.cat([up[:zero], down[zero : zero + 1], up[zero + 1 :]]), ups, still)
    after = method.server_receive(server, everyone, ups)
    return lasting_server(method, server), lasting_server(method, after), ups


def test_without_noise_it_is_the_plain_mean_of_clipped_moves() -> None:
    before, after, ups = one_round("fedavg", 1e-12, 0.3)
    start = torch.cat([t.flatten() for t in tree.leaves(before.weights)])
    rows = torch.cat([t.flatten(1) for t in tree.leaves(ups.weights)], 1) - start
    lengths = rows.norm(dim=1)
    assert lengths.min() < 0.3 < lengths.max()  # some are clipped
    mean = (rows * (0.3 / lengths).clamp_max(1)[:, None]).mean(0)  # all clients alike, whatever their size
    found = torch.cat([t.flatten() for t in tree.leaves(after.weights)]) - start
    torch.testing.assert_close(found, mean, atol=1e-10, rtol=0)


def test_noise_has_the_deviation_that_was_asked_for() -> None:
    quiet, loud = (one_round("fedavg", noise, 0.3)[1] for noise in (1e-12, 4.0))
    noise = torch.cat([(a - b).flatten() for a, b in zip(tree.leaves(loud), tree.leaves(quiet), strict=True)])
    assert float(noise.std()) == pytest.approx(4.0 * 0.3 / 5, rel=0.1)  # zC / S, over 888 numbers
    assert abs(float(noise.mean())) < 4 * 0.24 / len(noise) ** 0.5
    other = one_round("fedavg", 4.0, 0.3, seed=1)[1]
    assert toy.distance(tree.flatten(loud), tree.flatten(other)) > 0.1


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedcrc", "fedem"])
def test_a_client_changes_the_state_by_no_more_than_its_share(name: str) -> None:
    """Sensitivity, measured: neighbours are a client's moves, or none. The state's means move by C / S at most."""
    clip, parts = 0.2, {"scaffold": ("weights",), "fedcrc": ("encoder",), "fedem": ("components",)}
    for client in (1, 3):
        with_it, without = (one_round(name, 2.0, clip, zero=zero)[1] for zero in (None, client))
        picked = [tuple(getattr(s, p) for p in parts.get(name, ("weights",))) for s in (with_it, without)]
        squares = [(a - b).square().sum() for a, b in zip(*map(tree.leaves, picked), strict=True)]
        assert 0 < float(torch.stack(squares).sum().sqrt()) <= clip / 5 + 1e-12


def test_the_server_is_not_told_sizes() -> None:
    method = Protection(dp="client").around(toy.method("scaffold"), toy.model(), 5, 0)
    server = method.server_init(toy.model(), Census(torch.tensor([7, 9]), torch.ones(2, 4)))
    assert lasting_server(method, server).samples.tolist() == [1, 1]


def test_noise_is_new_in_every_round() -> None:
    model, data, method = toy.model(), toy.toy(), toy.method("fedavg", lr=0.0)
    quiet = Protection(dp="client", dp_noise=1.0).around(method, model, 5, 0)
    states = [toy.looped(quiet, model, data, rounds=r, join_ratio=1.0)[0]["server.server.weights.head.weight"]
              for r in (1, 2, 3)]  # fmt: skip
    first, second, third = states[0] - model.start.head["weight"], states[1] - states[0], states[2] - states[1]
    for a, b in ((first, second), (second, third), (first, third)):
        assert abs(float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])) < 0.7
        assert (a - b).abs().max() > 0.05


def test_the_guarantee_counts_the_rounds_of_the_busiest_client() -> None:
    model, data = toy.model(), toy.toy()
    rounds = taken_part(7, 20, 5, 3)
    assert sum(rounds) == 60
    assert max(rounds) < 20
    told = Protection(dp="client", dp_noise=3.0).guarantee(
        toy.method("fedavg"), model, data.train.x[:1], data.train.sizes, rounds, again=True
    )
    assert told["epsilon"] == pytest.approx(exact_epsilon(max(rounds) ** 0.5 / 3.0, 1e-5))
