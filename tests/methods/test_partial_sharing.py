"""What stays personal, by name: FedSim, FedAlt and FedBN against the methods they contain, and against plain loops."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from coterie.core import sharing, tree
from coterie.core.batch import Data
from coterie.core.data import FederatedData, Split
from coterie.core.errors import CoterieError
from coterie.core.model import Weights, make_model
from coterie.core.rehearsal import rehearse
from coterie.core.training import LocalTraining
from coterie.core.tree import Live
from coterie.execution import Looped, Turn
from coterie.methods import METHODS
from tests import plain, toy


def part(of: tree.Tree, prefix: str) -> tree.Tree:
    return {name.removeprefix(prefix): t for name, t in of.items() if name.startswith(prefix)}


CHOOSING = ["fedsim", "fedalt", "fedper", "fedrep", "lg-fedavg", "fedbn"]  # methods with `personal`


@pytest.mark.parametrize("name", CHOOSING)
@pytest.mark.parametrize("batch_norm", [False, True])
def test_nothing_personal_is_fedavg(name: str, batch_norm: bool) -> None:
    model, data = toy.model(batch_norm=batch_norm), toy.toy()
    found, _ = toy.looped(toy.method(name, personal="none"), model, data)
    expected, _ = toy.looped(toy.method("fedavg"), model, data)
    toy.assert_same(part(found, "server.shared."), part(expected, "server.weights."))


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize(
    ("name", "settings", "whole"),
    [("fedsim", {}, "fedper"), ("fedalt", {"personal_epochs": 2}, "fedrep")],
)
def test_a_personal_head_is_fedper_or_fedrep(name: str, settings: dict[str, Any], whole: str, batch_norm: bool) -> None:
    model, data = toy.model(batch_norm=batch_norm), toy.toy()
    same = {"head_epochs": 2} if whole == "fedrep" else {}
    found, history = toy.looped(toy.method(name, **settings), model, data)
    expected, other = toy.looped(toy.method(whole, **same), model, data)
    toy.assert_same(part(found, "server.shared.encoder."), part(expected, "server.shared.encoder."))
    for i in range(5):
        toy.assert_same(part(found, f"states.{i}.personal.head."), part(expected, f"states.{i}.personal.head."))
    assert history.curve("pre") == other.curve("pre")
    assert [r.bytes_up for r in history] == [r.bytes_up for r in other]


def test_a_personal_encoder_is_lg_fedavg() -> None:
    found, _ = toy.looped(toy.method("fedsim", personal="encoder"), toy.model(), toy.toy())
    expected, _ = toy.looped(toy.method("lg-fedavg"), toy.model(), toy.toy())
    toy.assert_same(part(found, "server.shared.head."), part(expected, "server.shared.head."))
    toy.assert_same(part(found, "states.3.personal.encoder."), part(expected, "states.3.personal.encoder."))


@pytest.mark.parametrize("name", ["fedper", "lg-fedavg", "fedbn", "fedrep"])
@pytest.mark.parametrize("personal", ["head", "encoder", "encoder.1|head.bias"])
def test_methods_with_the_same_personal_part_are_the_same(name: str, personal: str) -> None:
    """FedPer, LG-FedAvg and FedBN differ in what stays; FedRep trains the parts in turn, as FedAlt does."""
    model, data = toy.model(batch_norm=True), toy.toy()
    other = "fedalt" if name == "fedrep" else "fedsim"
    found, history = toy.looped(toy.method(name, personal=personal), model, data)
    expected, same = toy.looped(toy.method(other, personal=personal), model, data)
    toy.assert_same(part(found, "server.shared."), part(expected, "server.shared."))
    toy.assert_same(part(found, "states.2.personal."), part(expected, "states.2.personal."))
    assert history.curve("pre") == same.curve("pre")


def test_the_parts_of_fedper_average_to_a_global_model() -> None:
    """The mean of the layers that stay, by samples, next to those that are shared: the global model of FedAvg when all
    clients have one sample order and nothing is kept between rounds."""
    model, data = toy.model(), toy.toy()
    method = toy.method("fedper", personal="encoder.4|head", average_heads=True)
    found, history = toy.looped(method, model, data, rounds=1, join_ratio=1.0)
    averaged, _ = toy.looped(toy.method("fedavg"), model, data, rounds=1, join_ratio=1.0)
    whole = part(found, "server.shared.") | part(found, "server.personal.")
    toy.assert_same(dict(sorted(whole.items())), dict(sorted(part(averaged, "server.weights.").items())))
    assert history.curve("global")


def test_personal_norms_are_fedbn() -> None:
    model, data = toy.model(batch_norm=True), toy.toy()
    found, _ = toy.looped(toy.method("fedsim", personal="norm"), model, data)
    expected, history = toy.looped(toy.method("fedbn"), model, data)
    toy.assert_same(part(found, "server."), part(expected, "server."))
    toy.assert_same(part(found, "states.1.personal."), part(expected, "states.1.personal."))
    sent = sum(t.numel() for t in tree.leaves(model.start)) - 4 * 4  # weight, bias, mean and variance of 4 channels
    assert all(r.bytes_down == 3 * 8 * sent and r.bytes_up == 3 * 8 * (sent + 1) for r in history)


def test_fedbn_is_a_plain_loop() -> None:
    """Local SGD with torch's modules; all but the BatchNorm layers is averaged by samples."""
    data, network = toy.toy(augmented=False), toy.network(batch_norm=True).double()
    method = toy.method("fedbn", local_epochs=1, momentum=0.0, weight_decay=0.0, batch_size=40)  # one batch
    found, _ = toy.looped(method, toy.model(batch_norm=True), data, join_ratio=1.0, rounds=2)
    nets = [copy.deepcopy(network) for _ in range(5)]
    shares = torch.tensor(data.train.sizes, dtype=torch.float64) / sum(data.train.sizes)
    for _ in range(2):
        for i, net in enumerate(nets):
            x, y = data.train.client(i)
            loss = nn.functional.cross_entropy(net.train()((x.double() / 255 - 0.5) / 0.5), y)
            slopes = torch.autograd.grad(loss, list(net.parameters()))
            with torch.no_grad():
                for p, slope in zip(net.parameters(), slopes, strict=True):
                    p -= 0.05 * slope
        with torch.no_grad():
            for name in dict(nets[0].named_parameters()):
                if not name.startswith("1."):
                    mean = sum(w * dict(net.named_parameters())[name] for w, net in zip(shares, nets, strict=True))
                    for net in nets:
                        dict(net.named_parameters())[name].copy_(mean)
    for i, net in enumerate(nets):
        own = {n: t for n, t in net.state_dict().items() if n.startswith("1.") and "tracked" not in n}
        assert toy.distance(part(found, f"states.{i}.personal.encoder."), own) < 1e-10
    shared = {n: t for n, t in nets[0].state_dict().items() if n.startswith(("0.", "5."))}
    assert toy.distance(part(found, "server.shared.encoder."), shared) < 1e-10


def plain_rounds(personal: tuple[str, ...], alternate: bool, sgd: LocalTraining) -> list[dict[str, torch.Tensor]]:
    """Each client's network after plain.ROUNDS, with the shared parameters of the server. personal: its own names."""
    data, sizes = plain.data(), plain.data().train.sizes
    start = plain.copy(toy.network().double())
    shared = {n: t for n, t in start.items() if n not in personal}
    own = [{n: start[n] for n in personal} for _ in sizes]
    for joined, turn in plain.ROUNDS:
        trained = []
        for i in joined:
            net = toy.network().double()
            net.load_state_dict(shared | own[i])
            mine = [p for n, p in net.named_parameters() if n in personal]
            others = [p for n, p in net.named_parameters() if n not in personal]
            first = sgd.but(local_epochs=1)
            phases = [(first, mine), (sgd, others)] if alternate else [(sgd, [*mine, *others])]
            for training, parameters in phases:
                optimizer = plain.optimiser(parameters, training, turn)
                for x, y in plain.batches(data, i, turn, training):
                    net.zero_grad()
                    nn.functional.cross_entropy(net(x), y).backward()
                    optimizer.step()
            after = plain.copy(net)
            own[i] = {n: after[n] for n in personal}
            trained.append({n: after[n] for n in shared})
        shared = plain.mean(trained, [sizes[i] for i in joined])
    return [shared | one for one in own]


@pytest.mark.parametrize("name", ["fedsim", "fedalt"])
@pytest.mark.parametrize(
    ("personal", "own"), [("head", ("6.weight", "6.bias")), ("encoder.4|head.bias", ("4.weight", "4.bias", "6.bias"))]
)
def test_three_rounds_equal_the_plain_implementation(name: str, personal: str, own: tuple[str, ...]) -> None:
    """FedAlt trains its own part for one epoch first, while the shared one does not move, and the reverse after it."""
    sgd = LocalTraining(local_epochs=2, batch_size=8, lr=0.05, momentum=0.5, weight_decay=1e-3)
    net, method = toy.network(), METHODS[name](train=sgd, personal=personal)
    server, clients = plain.federation(method, plain.data(), toy.model())
    expected = plain_rounds(own, name == "fedalt", sgd)
    for i, whole in enumerate(expected):
        found = plain.named(sharing.join(server.shared, clients.states[i].personal), net)
        plain.assert_close(dict(sorted(found.items())), dict(sorted(whole.items())))


@pytest.mark.parametrize("name", ["fedsim", "fedalt"])
def test_two_clients_by_hand(name: str) -> None:
    """Softmax regression from zero, one step on all samples; the bias stays.

    All shares p of the classes are 1/2 in a slope at zero: p - y is 1/2 or -1/2. FedAlt's weights see the bias after
    its step.
    """
    data, model = plain.line(clients=2)
    rate, weights = 0.5, torch.zeros(2, 3, dtype=torch.float64)
    sgd = LocalTraining(local_epochs=1, batch_size=12, lr=rate, momentum=0.0)
    method = METHODS[name](train=sgd, personal="head.bias")
    server, clients = plain.federation(method, data, model, [([0, 1], Turn(0))])
    for i in (0, 1):
        x, y = data.train.client(i)
        second = y.double().mean()  # share of the second class
        bias = rate * torch.stack([(1 - second) - 0.5, second - 0.5])
        torch.testing.assert_close(clients.states[i].personal.head["bias"], bias)
        p = 1 / (1 + torch.exp(bias[0] - bias[1])) if name == "fedalt" else 0.5  # of the second class
        slope = ((p - y.double())[:, None] * x).mean(0)
        weights = weights - rate / 2 * torch.stack([-slope, slope])  # clients of 12 samples each
    torch.testing.assert_close(server.shared.head["weight"], weights)


def test_two_clients_of_fedbn_by_hand() -> None:
    """Features (1, -1) after LayerNorm, and logits (1, 0): p = 1 / (1 + e^-1) for the first class, which is right for
    client 0, of one sample, and wrong for client 1, of three. Slopes in the first logit are p - 1 and p.

    Each keeps its own scale and shift of the first feature; only the head is averaged.
    """
    network = nn.Sequential(nn.Flatten(), nn.LayerNorm(2, eps=0.0), nn.Linear(2, 2)).double()
    with torch.no_grad():
        network[2].weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
        network[2].bias.zero_()
    x = torch.tensor([[7.0, -7.0]], dtype=torch.float64).expand(4, 2)
    held = Split(x, torch.tensor([0, 1, 1, 1]), (1, 3))
    data, model = FederatedData("hand", 2, held, held), make_model(network, (2,), 2).to("cpu", torch.float64)
    sgd = LocalTraining(local_epochs=1, batch_size=3, lr=0.1, momentum=0.0)
    server, clients = plain.federation(METHODS["fedbn"](train=sgd), data, model, [([0, 1], Turn(0))])
    p = 1 / (1 + math.exp(-1))
    for i, slope in enumerate((p - 1, p)):
        own = clients.states[i].personal.encoder
        assert own["1.weight"].tolist() == pytest.approx([1 - 0.1 * slope, 1.0])
        assert own["1.bias"].tolist() == pytest.approx([-0.1 * slope, 0.0])
    mean = (p - 1) / 4 + p * 3 / 4
    head = server.shared.head
    assert head["weight"].flatten().tolist() == pytest.approx([1 - 0.1 * mean, 0.1 * mean, 0.1 * mean, -0.1 * mean])
    assert head["bias"].tolist() == pytest.approx([-0.1 * mean, 0.1 * mean])
    assert not server.shared.encoder


@pytest.mark.parametrize("name", ["fedsim", "fedalt", "fedper", "fedrep"])
@pytest.mark.parametrize("personal", ["norm", "encoder.1.*|head.*", "encoder.5.*", "*.bias", "encoder"])
def test_any_part_stacked_equals_looped(name: str, personal: str) -> None:
    method, model, data = toy.method(name, personal=personal, keep_momentum=True), toy.model(batch_norm=True), toy.toy()
    expected, history = toy.looped(method, model, data)
    assert toy.distance(expected, toy.stacked(method, model, data)[0]) < 1e-10
    names = sharing.personal_names(personal, model)
    kept = sum(t.numel() for n, t in tree.items(model.start) if n in names)
    whole = sum(t.numel() for t in tree.leaves(model.start))
    assert kept
    assert all(r.bytes_down == 3 * 8 * (whole - kept) for r in history)


def test_shared_statistics_do_not_move_while_the_personal_part_trains() -> None:
    model, data = toy.model(batch_norm=True), toy.toy()
    method = toy.method("fedalt", personal="encoder.5.*", local_epochs=0)
    clients = Looped(method, model, data, 7, processes=1)
    server = method.server_init(model, clients.census)
    before = tree.apply(torch.clone, server)
    x, y = data.train.client(0)
    held = Data(x, y, torch.tensor(3), torch.ones((), dtype=torch.float64), 4, data.transform, alone=True)
    state, up = method.client_train(model, method.client_init(model, held, {}), method.server_send(server, y), held)
    toy.assert_same(tree.flatten(before), tree.flatten(server))
    toy.assert_same(tree.flatten(up.shared), tree.flatten(server.shared))
    assert not torch.equal(state.personal.encoder["5.weight"], model.start.encoder["5.weight"])
    clients.close()


def test_split_and_join_are_inverse() -> None:
    model = toy.model(batch_norm=True)
    for personal in ("none", "head", "norm", "encoder.0.*"):
        shared, own = sharing.split(model.start, sharing.personal_names(personal, model))
        toy.assert_same(dict(sorted(tree.items(sharing.join(shared, own)))), dict(sorted(tree.items(model.start))))
    trained = sharing.join(Weights({}, Live(model.start.head)), Weights(model.start.encoder, {}))
    assert isinstance(trained.head, Live)
    assert not isinstance(trained.encoder, Live)


@pytest.mark.parametrize(
    ("personal", "said"),
    [
        ("heads.*", r"unknown weights to keep 'heads\.\*': did you mean 'head'"),
        ("head.*|encoder.4.wieght", r"unknown weights to keep 'encoder\.4\.wieght': did you mean 'encoder\.4\.weight'"),
        ("zzz", r"unknown weights to keep 'zzz': there are 0, 0\.bias"),
        ("*", "matches all weights of the network .* choose fewer, or method local"),
        ("norm", "needs a network with normalization layers"),
    ],
)
def test_patterns_that_make_no_sense(personal: str, said: str) -> None:
    for name in CHOOSING:
        if (name, personal) != ("fedbn", "norm"):  # its default, with a message of its own
            with pytest.raises(CoterieError, match=said):
                rehearse(toy.method(name, personal=personal), toy.model(), *toy_samples())


def test_fedbn_needs_normalization_layers() -> None:
    with pytest.raises(CoterieError, match="FedBN needs normalization layers"):
        rehearse(toy.method("fedbn"), toy.model(), *toy_samples())
    rehearse(toy.method("fedbn"), toy.model(batch_norm=True), *toy_samples())
    rehearse(toy.method("fedbn", personal="encoder.4"), toy.model(), *toy_samples())
    group = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(400, 4))
    assert sharing.norm_names(make_model(group, toy.SHAPE, 4)) == ("encoder.1.weight", "encoder.1.bias")


def toy_samples() -> tuple[torch.Tensor, torch.Tensor]:
    split = toy.toy().train
    return split.x[:4], split.y[:4]


def test_names_of_the_user_s_network_are_understood() -> None:
    """Modules and weights, as in the network that was given: the head is its layer 7 there."""
    model = toy.model()
    expected = sharing.personal_names("encoder.4.*|head.*", model)
    assert sharing.personal_names(f"4|{model.head_name}", model) == expected
    assert sharing.personal_names(f"4.*|{model.head_name}.weight|head.bias", model) == expected
