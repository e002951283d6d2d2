"""Training on the server: after every round, with a key of its own, wherever clients run, whatever wraps a method."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import coterie
from coterie.core import random, tree
from coterie.core.errors import CoterieError
from coterie.core.method import Method
from coterie.core.model import Model
from coterie.core.rehearsal import rehearse
from coterie.execution import Looped
from coterie.federation import Settings, federate, rounds
from coterie.methods.fedavg import FedAvg, Server
from coterie.privacy import Protection
from coterie.privacy.examine import examine
from tests import direct, toy


class Jitter(FedAvg):
    """Its server adds a random number to every weight."""

    def server_train(self, model: Model, server: Server, key: Tensor) -> Server:
        return Server(tree.apply(lambda t: t + random.normal(key, t.flatten()[:1]), server.weights))


def jitter() -> Any:
    return Jitter(train=toy.method("fedavg", local_epochs=0).train)


def shift(seed: int, number: int) -> float:
    """What a round adds: Box-Muller of the first two draws, computed here from the key."""
    key = random.derive(random.seed_key(~seed), random.SERVER, number)
    return float(random.normal(key, torch.zeros(1, dtype=torch.float64)))


def test_it_follows_every_round_with_the_key_of_the_round() -> None:
    """Clients that do not train send back what they received, so the server's training is all that moves."""
    found, _ = toy.looped(jitter(), toy.model(), toy.toy(), rounds=3)
    expected = sum(shift(7, number) for number in range(3))
    start = tree.flatten({"server": Server(toy.model().start)})
    for name, t in start.items():
        torch.testing.assert_close(found[name], t + expected)
    assert len({shift(seed, number) for seed in (6, 7) for number in range(3)}) == 6


def test_its_key_is_no_clients_key() -> None:
    ours = {int(random.server_key(3, number)) for number in range(20)}
    theirs = {int(random.derive(random.seed_key(3), number, i)) for number in range(20) for i in range(20)}
    assert len(ours) == 20
    assert not ours & theirs


def test_stacked_and_remote_are_the_same(tmp_path: Path) -> None:
    method, model, data = Jitter(train=toy.method("fedavg").train), toy.model(torch.float32), toy.toy()
    settings = Settings(rounds=2, seed=7)
    expected, _ = federate(Looped(method, model, data, 7, processes=1), settings)
    remote, _ = federate(direct.remote(method, model, data, tmp_path), settings)
    toy.assert_same(tree.flatten(remote), tree.flatten(expected))
    found, _ = toy.stacked(method, toy.model(), data)
    assert toy.distance(toy.looped(method, toy.model(), data)[0], found) < 1e-10


def test_a_resumed_run_continues_to_the_last_bit(tmp_path: Path) -> None:
    def run(**how: Any) -> Any:
        return coterie.run(jitter(), toy.toy(), toy.network(), rounds=4, seed=3, backend="looped", **how)

    def stop(record: Any) -> None:
        if record.number == 3:
            raise RuntimeError("a power cut")

    with pytest.raises(RuntimeError, match="a power cut"):
        run(out=tmp_path / "run", watch=stop)
    again = run(out=tmp_path / "run", exist="resume")
    toy.assert_same(tree.flatten(again.server), tree.flatten(run().server))


def test_an_optimistic_step_includes_it() -> None:
    """One client's answer is refused: the server receives and trains again, with the same key."""
    found = []
    for waits in (True, False):
        clients = toy.Spoilt(jitter(), toy.model(), toy.toy(), 7, spoilt={3: float("nan")})
        with patch.object(rounds, "known_on_cpu", lambda t, waits=waits: waits):
            found.append(toy.outcome(clients, rounds=2, join_ratio=1.0)[0])
    toy.assert_same(*found)


@pytest.mark.parametrize("protection", [{"robust": "clip"}, {"robust": "median"}, {"dp": "client"}, {"dp": "sample"}])
def test_protected_methods_train_too(protection: dict[str, Any]) -> None:
    method = Protection(**protection, dp_noise=1e-9).around(jitter(), toy.model(), 5, 7)
    assert method.trains_on_server
    found, _ = toy.looped(method, toy.model(), toy.toy(), rounds=1, join_ratio=1.0)
    head = next(t for name, t in found.items() if name.endswith("weights.head.bias"))
    torch.testing.assert_close(head, toy.model().start.head["bias"] + shift(7, 0), atol=1e-6, rtol=0)


def test_it_is_not_called_for_a_method_without_it() -> None:
    assert not toy.method("fedavg").trains_on_server
    with patch.object(Method, "server_train", side_effect=AssertionError):
        toy.looped(toy.method("fedavg"), toy.model(), toy.toy(), rounds=1)


def test_an_encrypted_server_cannot_train() -> None:
    with pytest.raises(CoterieError, match=r"^Jitter cannot be encrypted: its server trains on what clients send"):
        examine(jitter())


def test_a_state_of_another_form_is_reported_before_the_run() -> None:
    class Wrong(FedAvg):
        def server_train(self, model: Model, server: Server, key: Tensor) -> Server:
            return Server({"lost": key})  # type: ignore[arg-type]

    x = torch.randint(0, 60, (4, *toy.SHAPE), dtype=torch.uint8)
    with pytest.raises(CoterieError, match=r"Wrong\.server_train returns .* but server_init made it"):
        rehearse(Wrong(), toy.model(), x, torch.arange(4))
