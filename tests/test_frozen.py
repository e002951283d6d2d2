"""Frozen means frozen, for every method: never trained, never stacked for a client, never sent, stored once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import coterie
from coterie.core import tree
from coterie.core.data import FederatedData, Split, Transform
from coterie.core.errors import CoterieError
from coterie.core.model import Model, make_model
from coterie.core.rehearsal import rehearse
from coterie.deploy.device_setup import DevicePolicy, network_from_terms
from coterie.deploy.handshake import SampleSchema, Terms
from coterie.execution import Backend, Looped, Stacked
from coterie.federation import Settings, federate
from coterie.methods import METHODS
from tests import direct, toy, traffic

every_method = pytest.mark.parametrize("name", METHODS)


def backbone(seed: int = 0) -> nn.Module:
    """Convolution and BatchNorm are pretrained and frozen; a dense layer and the head are trained."""
    network = toy.network(batch_norm=True, seed=seed)
    for layer in (network[0], network[1]):  # type: ignore[index]
        layer.requires_grad_(False)
    with torch.no_grad():
        network[1].running_mean.fill_(0.1)  # type: ignore[index]
    return network


def model(dtype: torch.dtype = torch.float64) -> Model:
    return make_model(backbone(), toy.SHAPE, toy.CLASSES, toy.toy().transform).to("cpu", dtype)


def before_and_after(clients: Backend, **settings: Any) -> tuple[tree.Tree, tree.Tree]:
    before = {n: t.clone() for n, t in clients.model.frozen.items()}
    toy.outcome(clients, **settings)
    return before, clients.model.frozen


@every_method
def test_stacked_equals_looped(name: str) -> None:
    method, data = toy.method(name), toy.toy()
    expected, history = toy.looped(method, model(), data, rounds=2)
    found, again = toy.stacked(method, model(), data, rounds=2)
    assert toy.distance(expected, found) < 1e-10
    assert again.curve("pre") == history.curve("pre")


@every_method
@pytest.mark.parametrize("kind", [Looped, Stacked])
def test_it_stays_to_the_last_bit(name: str, kind: Any) -> None:
    before, after = before_and_after(kind(toy.method(name), model(), toy.toy(), 7), rounds=1)
    assert {"encoder.0.weight", "encoder.1.weight", "encoder.1.running_mean"} <= set(before)
    toy.assert_same(before, after)


@every_method
def test_bytes_are_those_of_what_is_trained(name: str) -> None:
    """The formula of the paper, for the dense layer of 100 x 8 and the head of 8 x 4 only."""
    up, down = (formula(100 * 8 + 8, 8 * 4 + 4, toy.CLASSES, 8) for formula in traffic.NUMBERS[name])
    _, history = toy.looped(toy.method(name), model(torch.float32), toy.toy(), rounds=1)
    assert (history[0].bytes_up, history[0].bytes_down) == (3 * 4 * up, 3 * 4 * down)


def test_it_is_training_on_features_of_the_frozen_part() -> None:
    """An identity: the rest of the network, trained on what the frozen layers make of every sample."""
    whole, data = model(), toy.toy(augmented=False)
    layers = list(whole.encoder.children())
    below, above = nn.Sequential(*layers[:5]).eval(), nn.Sequential(*layers[5:])
    network = nn.Sequential(above, whole.head)
    for part, weights in (("0", whole.start.encoder), ("1", whole.start.head)):
        own = {n.replace("5.", "0.") if part == "0" else n: t for n, t in weights.items()}
        network[int(part)].load_state_dict(own)

    def seen(split: Split) -> Split:
        with torch.no_grad():
            return replace(split, x=below(whole.prepare(split.x)))

    features = FederatedData("features", toy.CLASSES, seen(data.train), seen(data.test), transform=Transform())
    on_features = make_model(network, (100,), toy.CLASSES)
    expected, _ = toy.looped(toy.method("fedavg"), on_features, features)
    found, _ = toy.looped(toy.method("fedavg"), whole, data)
    renamed = {n.replace(".5.", ".0.0."): t for n, t in found.items()}
    assert toy.distance({n: expected[n] for n in renamed}, renamed) < 1e-10


def terms(data: FederatedData) -> Terms:
    checksum = "0" * 32
    return Terms(checksum, checksum, checksum, {}, None, None, 5, 1, ("test",), 0, "none", SampleSchema.of(data))


@pytest.mark.parametrize("name", ["fedavg", "fedper", "fedpac", "scaffold"])
def test_over_the_wire_it_is_sent_once(name: str, tmp_path: Path) -> None:
    """Devices that built another network get the frozen part with the first message, and never again."""
    method, net, data = toy.method(name), model(torch.float32), toy.toy()
    agreement = direct.agreement(method, net, data)
    other = make_model(backbone(seed=5), toy.SHAPE, toy.CLASSES, data.transform)
    joined = network_from_terms(terms(data), DevicePolicy(tmp_path, backbone(seed=5)), agreement.start_message())
    assert not torch.equal(other.frozen["encoder.0.weight"], net.frozen["encoder.0.weight"])
    toy.assert_same(joined.initial, net.initial)
    for schema in (agreement.up, agreement.own, agreement.shared, agreement.welcome):
        assert not any(net.frozen["encoder.0.weight"].shape == shape for _, _, shape in schema.entries)
    clients = direct.remote(method, net, data, tmp_path / "devices")
    server, _ = federate(clients, Settings(rounds=2, seed=7))
    local, _ = federate(Looped(method, net, data, 7, processes=1), Settings(rounds=2, seed=7))
    toy.assert_same(tree.flatten(server), tree.flatten(local))


def test_another_frozen_part_is_refused_on_a_device(tmp_path: Path) -> None:
    data = toy.toy()
    start = direct.agreement(toy.method("fedavg"), model(torch.float32), data).start_message()
    with pytest.raises(CoterieError, match="differs from the server's"):
        network_from_terms(terms(data), DevicePolicy(tmp_path, toy.network(batch_norm=True)), start)


@pytest.mark.parametrize("name", ["fedavg", "fedrep", "fedpac", "ditto"])
def test_a_run_folder_has_it_once(name: str, tmp_path: Path) -> None:
    out, data = tmp_path / "run", toy.toy()
    result = coterie.run(toy.method(name), data, backbone(), rounds=2, seed=3, backend=toy.IN_TURN, out=out)
    kept = load_file(out / "models" / "frozen.safetensors")
    toy.assert_same(kept, result.model.frozen)
    for file in (out / "models").glob("client-*.safetensors"):
        assert not any(t.shape == kept["encoder.0.weight"].shape for t in load_file(file).values())
    loaded = coterie.load_run(out, backbone(seed=9))  # another pretrained network: what was stored counts
    for client in (0, 3):
        a, b = (source.personal_model(client)(data.test.x) for source in (result, loaded))
        assert torch.equal(a, b)


def test_resume_is_exact_and_needs_the_same_frozen_part(tmp_path: Path) -> None:
    out, data, method = tmp_path / "run", toy.toy(), toy.method("fedper", keep_momentum=True)
    whole = coterie.run(method, data, backbone(), rounds=4, seed=3, backend=toy.IN_TURN)

    def stop(record: Any) -> None:
        if record.number == 3:
            raise RuntimeError("a power cut")

    with pytest.raises(RuntimeError, match="a power cut"):
        coterie.run(method, data, backbone(), rounds=4, seed=3, backend=toy.IN_TURN, out=out, watch=stop)
    moved = backbone()
    with torch.no_grad():
        moved[0].weight.add_(1e-3)  # type: ignore[index]
    with pytest.raises(CoterieError, match=r"model\.start was .* and is"):
        coterie.run(method, data, moved, rounds=4, seed=3, backend=toy.IN_TURN, out=out, exist="resume")
    again = coterie.run(method, data, backbone(), rounds=4, seed=3, backend=toy.IN_TURN, out=out, exist="resume")
    toy.assert_same(tree.flatten(again.server), tree.flatten(whole.server))
    toy.assert_same(tree.flatten(again.states[1]), tree.flatten(whole.states[1]))


@pytest.mark.parametrize("name", ["fedavg", "ditto", "fedrep", "fedpac", "knn-per", "fedem"])
def test_a_linear_probe(name: str) -> None:
    """The whole encoder is frozen."""
    network = toy.network(batch_norm=True)
    for layer in list(network.children())[:-1]:
        layer.requires_grad_(False)
    probe = make_model(network, toy.SHAPE, toy.CLASSES, toy.toy().transform).to("cpu", torch.float64)
    assert not probe.start.encoder
    expected, _ = toy.looped(toy.method(name), probe, toy.toy(), rounds=2)
    found, _ = toy.stacked(toy.method(name), probe, toy.toy(), rounds=2)
    assert toy.distance(expected, found) < 1e-10


def held(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, torch.arange(len(x)) % toy.CLASSES


@pytest.mark.parametrize(("name", "part"), [("fedrep", "head"), ("fedper", "head"), ("fedbabu", "encoder")])
def test_what_a_method_trains_on_its_own_must_not_be_frozen(name: str, part: str) -> None:
    network = toy.network()
    *body, head = network.children()
    for layer in [head] if part == "head" else body:
        layer.requires_grad_(False)
    made = make_model(network, toy.SHAPE, toy.CLASSES)
    x, y = held(torch.rand(4, *toy.SHAPE))
    with pytest.raises(CoterieError, match=f"needs a {part} that it can train, but the {part} of this .* is frozen"):
        rehearse(toy.method(name), made, x, y)
    rehearse(toy.method("fedavg"), made, x, y)
