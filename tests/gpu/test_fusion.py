"""Fused models and whole runs with them against plain ones. Without a GPU, Triton interprets the kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap

from coterie.core.data import Transform
from coterie.core.model import Model, make_model
from coterie.core.tree import Tree
from coterie.execution import Stacked
from coterie.gpu import devices
from coterie.gpu.fusion import FusedConv, FusedLinear, FusedModel, fuse
from coterie.gpu.kernels import norm
from tests import toy

pytestmark = pytest.mark.usefixtures("interpreted")
RAW = Transform((0.4, 0.5, 0.6), (0.2, 0.3, 0.25))


def network() -> nn.Module:
    torch.manual_seed(0)
    body = [nn.Conv2d(3, 4, 5), nn.MaxPool2d(2), nn.LeakyReLU(0.01)]
    body += [nn.Conv2d(4, 6, 3, padding=1), nn.MaxPool2d(2), nn.ReLU()]
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(24, 7), nn.LeakyReLU(), nn.Linear(7, 5)).double()


@pytest.fixture(scope="module")
def plain() -> Model:
    return make_model(network(), (3, 12, 12), 5, RAW)


def test_a_fused_model_has_the_same_weights(plain: Model) -> None:
    made = fuse(plain)
    assert isinstance(made, FusedModel)
    assert [type(made.encoder[i]) for i in (0, 3, 7)] == [FusedConv, FusedConv, FusedLinear]  # type: ignore[index]
    assert type(made.head) is FusedLinear
    for part, weights in zip((made.encoder, made.head), plain.start, strict=True):
        assert {n: p.shape for n, p in part.named_parameters()} == {n: t.shape for n, t in weights.items()}


@pytest.mark.parametrize(
    "body",
    [
        [nn.Conv2d(1, 4, 3, stride=2), nn.MaxPool2d(2), nn.ReLU()],
        [nn.Conv2d(1, 4, 3, bias=False), nn.MaxPool2d(2), nn.ReLU()],
        [nn.Conv2d(1, 4, 3, padding="same"), nn.MaxPool2d(2), nn.ReLU()],
        [nn.Conv2d(1, 4, (3, 5)), nn.MaxPool2d(2), nn.ReLU()],
        [nn.Conv2d(1, 4, 3), nn.MaxPool2d(3), nn.ReLU()],
        [nn.Conv2d(1, 4, 3), nn.MaxPool2d(2, ceil_mode=True), nn.ReLU()],
        [nn.Conv2d(1, 4, 3), nn.MaxPool2d(2), nn.Tanh()],
        [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.MaxPool2d(2), nn.ReLU()],
        [nn.Conv2d(1, 4, 3)],
    ],
)
def test_what_does_not_fit_stays_as_it_is(body: list[nn.Module]) -> None:
    network = nn.Sequential(*body, nn.Flatten(), nn.LazyLinear(4))
    network(torch.zeros(1, 1, 12, 12))
    model = make_model(network, (1, 12, 12), 4, Transform((0.5,), (0.5,)))
    made = fuse(model)
    assert type(made) is Model  # it normalises samples
    assert str(made.encoder) == str(model.encoder)


def copies(weights: Tree, count: int) -> Tree:
    """Each its own weights."""
    return {n: torch.stack([t + 0.1 * torch.randn_like(t) for _ in range(count)]) for n, t in weights.items()}


def loss(model: Model, head: Tree) -> object:
    def one(encoder: Tree, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model.logits(head, model.features(encoder, x)), y)

    return one


def clients() -> tuple[Tensor, Tensor]:
    return torch.randint(0, 256, (3, 2, 3, 12, 12), dtype=torch.uint8), torch.randint(0, 5, (3, 2))


@pytest.mark.parametrize("shared", [True, False], ids=["one network", "own networks"])
def test_features_and_gradients_of_clients_side_by_side(plain: Model, shared: bool) -> None:
    weights, dim = (plain.start.encoder, None) if shared else (copies(plain.start.encoder, 3), 0)
    x, y = clients()
    made, expected = (
        (
            vmap(model.features, in_dims=(dim, 0))(weights, x),
            *vmap(grad(loss(model, plain.start.head)), in_dims=(dim, 0, 0))(weights, x, y).values(),
        )
        for model in (fuse(plain), plain)
    )
    for a, b in zip(made, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


def test_several_networks_of_each_client(plain: Model) -> None:
    weights = {n: t.unflatten(0, (2, 2)) for n, t in copies(plain.start.encoder, 4).items()}
    x, y = (t[:2] for t in clients())
    made, expected = (
        vmap(vmap(grad(loss(model, plain.start.head)), in_dims=(0, None, None)))(weights, x, y)
        for model in (fuse(plain), plain)
    )
    for name in expected:
        torch.testing.assert_close(made[name], expected[name], rtol=0, atol=1e-13)


@pytest.mark.parametrize("kind", ["plain", pytest.param("fused", marks=pytest.mark.gpu)])  # not interpreted: bfloat16
def test_half_precision_products_stay_near(plain: Model, kind: str) -> None:
    device = "cuda" if kind == "fused" else "cpu"
    single = plain.to(device, torch.float32)
    half = replace(single, precision="bf16")
    x, y = (t[0].to(device) for t in clients())
    expected = grad(loss(single, single.start.head))(single.start.encoder, x, y)
    made = grad(loss(fuse(half) if kind == "fused" else half, single.start.head))(single.start.encoder, x, y)
    for name, value in expected.items():
        assert made[name].dtype == torch.float32
        assert float((made[name] - value).norm() / value.norm()) < 0.05


@pytest.mark.parametrize(("name", "own"), [("fedpac", {}), ("fedem", {"components": 2}), ("pfakd", {})])
def test_a_whole_run_is_that_of_the_plain_way(name: str, own: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged clients, augmentation, momentum: all as without any fused part. (Small: interpreting is slow.)"""
    data, method = toy.toy(train=(9, 3), test=(2, 1)), toy.method(name, local_epochs=1, **own)
    expected, history = toy.looped(method, toy.model(), data, rounds=1, join_ratio=1.0)
    monkeypatch.setattr(devices, "runs_triton", lambda device: True)
    assert isinstance(Stacked(method, toy.model(), data, 7).fast, FusedModel)
    made, again = toy.stacked(method, toy.model(), data, rounds=1, join_ratio=1.0)
    assert toy.distance(made, expected) < 1e-10
    assert again.curve("pre") == history.curve("pre")


def test_a_whole_run_with_batch_norm_is_that_of_the_plain_way(monkeypatch: pytest.MonkeyPatch) -> None:
    data, method = toy.toy(train=(12, 9), test=(2, 1)), toy.method("fedavg", local_epochs=1)
    given = method, toy.model(batch_norm=True), data
    expected, history = toy.looped(*given, rounds=1, join_ratio=1.0)
    asked = Mock(wraps=norm.moments)
    monkeypatch.setattr(devices, "runs_triton", lambda device: True)
    monkeypatch.setattr(norm, "moments", asked)
    made, again = toy.stacked(*given, rounds=1, join_ratio=1.0)
    assert asked.called
    assert toy.distance(made, expected) < 1e-10
    assert again.curve("pre") == history.curve("pre")
