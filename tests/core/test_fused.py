"""Fused layers, draws and steps against torch's own, in value and gradient. Without a GPU, Triton interprets them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap

from coterie.clients import Batched
from coterie.core import fused, order, stacks
from coterie.core.dense import FusedLinear
from coterie.core.fused import FusedConv, FusedModel, fuse
from coterie.core.kernels import conv, norm, steps
from coterie.core.kernels.conv import Geometry
from coterie.core.local import augment
from coterie.core.model import Model, make_model
from coterie.core.samples import Transform
from coterie.core.tree import Tree
from tests import toy

SHAPES = [Geometry(8, 8, 3, 5, 0), Geometry(9, 7, 4, 3, 1), Geometry(8, 9, 2, 4, 0), Geometry(7, 7, 3, 5, 2)]
RATE = torch.tensor(0.5, dtype=torch.float64)  # of a learning rate of 0.2
RAW = Transform((0.4, 0.5, 0.6), (0.2, 0.3, 0.25))


def plain_windows(x: Tensor, shape: Geometry) -> Tensor:
    padded = F.pad(x, (shape.padding,) * 4)
    seen = padded.unfold(2, shape.side, 2).unfold(3, shape.side, 2)[:, :, : shape.rows, : shape.columns]
    return seen.permute(0, 2, 3, 4, 5, 1).reshape(-1, shape.entries)


@pytest.mark.parametrize("shape", SHAPES)
def test_windows_and_their_adjoint(shape: Geometry) -> None:
    x = torch.randn(2, shape.channels, shape.height, shape.width, dtype=torch.float64, requires_grad=True)
    made = conv.windows(x.detach(), shape, torch.float64, None, None)
    expected = plain_windows(x, shape)
    assert torch.equal(made[:, : shape.entries], expected)
    assert bool((made[:, shape.entries] == 1).all())  # for the bias
    assert not made[:, shape.entries + 1 :].any()
    slopes = torch.randn_like(made)
    (gradient,) = torch.autograd.grad(expected, x, slopes[:, : shape.entries])
    torch.testing.assert_close(conv.fold(slopes, shape, 2).movedim(3, 1), gradient, rtol=0, atol=1e-14)


@pytest.mark.parametrize("planar", [True, False])
def test_raw_pixels_are_normalised_on_the_way(planar: bool) -> None:
    shape = Geometry(8, 8, 3, 3, 1)
    x = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    mean, std = torch.tensor(RAW.mean, dtype=torch.float64), torch.tensor(RAW.std, dtype=torch.float64)
    normal = (x.double() / 255 - mean[:, None, None]) / std[:, None, None]  # padding comes after this
    given = x if planar else x.contiguous(memory_format=torch.channels_last)
    made = conv.windows(given, shape, torch.float64, mean, std)[:, : shape.entries]
    torch.testing.assert_close(made, plain_windows(normal, shape), rtol=0, atol=1e-12)


def test_the_largest_of_four_wins_and_nan_is_not_lost() -> None:
    four = torch.randn(37, 4, 6)
    four[0, 2, 0] = torch.nan
    four[1, :, 1] = 2.0  # a tie: the first, as in torch
    out, winner = conv.pool(four, 0.01)
    assert bool(out[0, 0].isnan())
    assert int(winner[1, 1]) == 0
    assert torch.equal(out[1:], F.leaky_relu(four.amax(1), 0.01)[1:])
    assert torch.equal(winner[1:].long(), four.argmax(1)[1:])


@pytest.mark.parametrize("transform", [Transform(crop=2, flip=True), Transform(crop=1), Transform(flip=True)])
def test_draws_are_the_plain_ones(transform: Transform) -> None:
    x = torch.randint(0, 256, (2, 7, 3, 9, 10), dtype=torch.uint8)
    index = torch.randint(0, 7, (2, 5))
    bits = order.bits(order.seed_key(3), torch.arange(10)).view(2, 5)
    made = steps.draw(x, index, bits, transform.crop, transform.flip)
    for c in range(2):
        assert torch.equal(made[c], augment(x[c][index[c]], bits[c], transform))
    under_vmap = vmap(lambda x, i, b: stacks.call(fused.Drawn, x[None], i[None], b[None], *crop_and_flip(transform))[0])
    assert torch.equal(under_vmap(x, index, bits), made)


def crop_and_flip(transform: Transform) -> tuple[int, bool]:
    return transform.crop, transform.flip


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


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_a_step_is_torchs_step(momentum: float) -> None:
    """Of more tensors than one launch takes, some of them longer than what one program does."""
    sizes = [1, 2 * steps.TILE + 3, steps.TILE, *range(2, steps.TOGETHER)]
    weights = [torch.randn(size, dtype=torch.float64) for size in sizes]
    count = len(weights)
    slopes = [[torch.randn_like(w) for w in weights] for _ in range(2)]
    parameters = [w.clone().requires_grad_() for w in weights]
    optimiser = torch.optim.SGD(parameters, lr=0.1, momentum=momentum, weight_decay=0.01)
    velocities: list[Tensor] = []
    for now in slopes:
        for p, slope in zip(parameters, now, strict=True):
            p.grad = slope
        optimiser.step()
        made = stacks.call(fused.Descent, RATE, None, 0.2, 0.01, momentum, count, *weights, *now, *velocities)
        weights, velocities = list(made[:count]), list(made[count:])
    for ours, theirs in zip(weights, parameters, strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=0, atol=1e-15)


@pytest.mark.parametrize("rolling", [True, False], ids=["velocity", "first step"])
def test_who_is_not_active_does_not_move(rolling: bool) -> None:
    """Three clients, of two models each; the second client's batch is padding."""
    weight, slope, velocity = torch.randn(3, 3, 2, 5, 7, dtype=torch.float64).unbind()
    active = torch.tensor([True, False, True])

    def one(w: Tensor, g: Tensor, v: Tensor, on: Tensor) -> tuple[Tensor, Tensor]:
        moved, speed = stacks.call(fused.Descent, RATE, on, 0.2, 0.01, 0.5, 1, w, g, *[v] * rolling)
        return moved, speed

    models = vmap(one, in_dims=(0, 0, 0, None))
    moved, speed = vmap(models)(weight, slope, velocity, active)
    before = velocity if rolling else torch.zeros_like(velocity)
    on = active[:, None, None, None]
    expected = slope + 0.01 * weight + 0.5 * before
    torch.testing.assert_close(speed, torch.where(on, expected, before), rtol=0, atol=1e-15)
    torch.testing.assert_close(moved, torch.where(on, weight - 0.1 * expected, weight), rtol=0, atol=1e-15)
    assert torch.equal(moved[1], weight[1])


@pytest.mark.parametrize(("name", "own"), [("fedpac", {}), ("fedem", {"components": 2}), ("pfakd", {})])
def test_a_whole_run_is_that_of_the_plain_way(name: str, own: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged clients, augmentation, momentum: all as without any fused part. (Small: interpreting is slow.)"""
    data, method = toy.toy(train=(9, 3), test=(2, 1)), toy.method(name, epochs=1, **own)
    expected, history = toy.looped(method, toy.model(), data, rounds=1, join_ratio=1.0)
    monkeypatch.setattr(stacks, "usable", lambda device: True)
    assert isinstance(Batched(method, toy.model(), data, 7).fast, FusedModel)
    made, again = toy.batched(method, toy.model(), data, rounds=1, join_ratio=1.0)
    assert toy.distance(made, expected) < 1e-10
    assert again.curve("pre") == history.curve("pre")


def test_a_whole_run_with_batch_norm_is_that_of_the_plain_way(monkeypatch: pytest.MonkeyPatch) -> None:
    data, method = toy.toy(train=(12, 9), test=(2, 1)), toy.method("fedavg", epochs=1)
    given = method, toy.model(batch_norm=True), data
    expected, history = toy.looped(*given, rounds=1, join_ratio=1.0)
    asked = Mock(wraps=norm.moments)
    monkeypatch.setattr(stacks, "usable", lambda device: True)
    monkeypatch.setattr(norm, "moments", asked)
    made, again = toy.batched(*given, rounds=1, join_ratio=1.0)
    assert asked.called
    assert toy.distance(made, expected) < 1e-10
    assert again.curve("pre") == history.curve("pre")
