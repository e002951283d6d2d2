"""Methods that must coincide, do."""

from __future__ import annotations

import dataclasses

import torch

from coterie.core import tree
from coterie.core.data import FederatedData
from coterie.core.model import Weights
from coterie.execution import Looped
from coterie.federation import Settings, federate
from coterie.methods.ditto import Ditto
from tests import toy


def part(found: tree.Tree, prefix: str) -> tree.Tree:
    return {name.removeprefix(prefix): t for name, t in found.items() if name.startswith(prefix)}


def test_fedavg_of_one_client_is_plain_sgd() -> None:
    """Two rounds of two epochs, momentum starting anew with each: the same as Local, and as torch's optimiser."""
    data = toy.toy(train=(20,), test=(5,))
    alone, _ = toy.looped(toy.method("local"), toy.model(), data, rounds=2, join_ratio=1.0)
    averaged, _ = toy.looped(toy.method("fedavg"), toy.model(), data, rounds=2, join_ratio=1.0)
    toy.assert_same(part(alone, "states.0.weights."), part(averaged, "server.weights."))


def test_ditto_without_pull_is_local_beside_fedavg() -> None:
    model, data = toy.model(), toy.toy()
    found, _ = toy.looped(toy.method("ditto", pull=0.0), model, data)
    local, _ = toy.looped(toy.method("local"), model, data)
    averaged, _ = toy.looped(toy.method("fedavg"), model, data)
    for i in range(5):
        toy.assert_same(part(found, f"states.{i}.weights."), part(local, f"states.{i}.weights."))
    toy.assert_same(part(found, "server."), part(averaged, "server."))


def test_ditto_with_a_strong_pull_stays_at_the_shared_model() -> None:
    """lr * pull = 1: without momentum, one step of the pull alone goes all the way to the model received."""
    method = Ditto(train=toy.method("ditto", lr=1e-6, momentum=0.0, weight_decay=0.0).train, pull=1e6)
    found, _ = toy.looped(method, toy.model(), toy.toy(), rounds=1, join_ratio=1.0)
    start = tree.flatten(toy.model().start)
    for i in range(5):
        assert toy.distance(part(found, f"states.{i}.weights."), start) < 1e-4


def test_fedrep_without_head_epochs_trains_the_encoder_only() -> None:
    found, _ = toy.looped(toy.method("fedrep", head_epochs=0), toy.model(), toy.toy())
    for i in range(5):
        toy.assert_same(part(found, f"states.{i}.personal.head."), tree.flatten(toy.model().start.head))


def test_fedrep_without_encoder_epochs_leaves_the_encoder() -> None:
    found, _ = toy.looped(toy.method("fedrep", encoder_epochs=0), toy.model(), toy.toy())
    start = toy.model().start.encoder
    assert toy.distance(part(found, "server.shared.encoder."), start) < 1e-15  # an average of equals


def test_fedpac_without_anything_keeps_heads_as_they_were_sent() -> None:
    """Its heads are then those of FedRep trained at FedPAC's head learning rate, one epoch."""
    data = toy.toy(augmented=False)
    pac = toy.method("fedpac", align=0.0, combine=False, head_lr=0.05)
    found, _ = toy.looped(pac, toy.model(), data)
    rep, _ = toy.looped(toy.method("fedrep", head_epochs=1), toy.model(), data)
    for i in range(5):
        mine = {name: t[i] for name, t in part(found, "server.heads.").items()}
        assert toy.distance(mine, part(rep, f"states.{i}.personal.head.")) < 1e-12
    assert toy.distance(part(found, "server.encoder."), part(rep, "server.shared.encoder.")) < 1e-12


def relabelled(data: FederatedData, names: torch.Tensor) -> FederatedData:
    splits = {s: dataclasses.replace(getattr(data, s), y=names[getattr(data, s).y]) for s in ("train", "test")}
    return dataclasses.replace(data, **splits)


def test_other_names_of_the_classes_change_nothing_for_local() -> None:
    """Labels and rows of the head permuted together: the same model under other names."""
    data, names = toy.toy(), torch.tensor([2, 0, 3, 1])
    model = toy.model()
    start = Weights(model.start.encoder, {n: t[names.argsort()] for n, t in model.start.head.items()})
    _, plain = toy.looped(toy.method("local"), model, data)
    _, shifted = toy.looped(toy.method("local"), dataclasses.replace(model, start=start), relabelled(data, names))
    for a, b in zip(plain, shifted, strict=True):
        assert {k: s.weighted.tolist() for k, s in a.scores.items()} == {
            k: s.weighted.tolist() for k, s in b.scores.items()
        }


def test_fine_tuning_equals_one_more_local_training() -> None:
    """FedAvg-FT is what FedAvg's clients have after training from the final model, and leaves that model alone."""
    model, data, method = toy.model(), toy.toy(), toy.method("fedavg")
    clients = Looped(method, model, data, 7, processes=1)
    server, history = federate(clients, Settings(rounds=2, seed=7))
    _, more = toy.looped(method, model, data, rounds=3, join_ratio=1.0)
    tuned, post = history[-1].scores["finished", "test"], more[2].scores["post", "test"]
    assert tuned.weighted.tolist() == post.weighted.tolist()
    shorter = Looped(method, model, data, 7, processes=1)
    again, _ = federate(shorter, Settings(rounds=2, seed=7, evaluate_every=2))
    toy.assert_same(tree.flatten(server), tree.flatten(again))
