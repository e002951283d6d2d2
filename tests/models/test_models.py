"""Networks: sizes as published, seeds, shapes they refuse, and the same results one by one or stacked."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn.functional import cross_entropy

from coterie.core.errors import CoterieError
from coterie.models import MODELS, build

GREY, COLOUR = (1, 28, 28), (3, 32, 32)
SERIES = {"cnn1d": (3, 32), "lstm": (32, 3), "transformer": (32, 3)}  # networks that take no images


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


# Sizes


@pytest.mark.parametrize(
    ("name", "shape", "classes", "options", "encoder", "head", "dim"),
    [
        ("cnn", GREY, 10, {}, 115_776, 1_290, 128),
        ("cnn", GREY, 62, {}, 115_776, 7_998, 128),
        ("cnn", COLOUR, 10, {}, 106_400, 1_290, 128),
        ("convnet", COLOUR, 10, {}, 796_032, 1_930, 192),
        ("convnet", COLOUR, 100, {}, 796_032, 19_300, 192),
        ("convnet", GREY, 10, {}, 571_648, 1_930, 192),
        ("convnet", GREY, 47, {}, 571_648, 9_071, 192),
        ("convnet", GREY, 62, {}, 571_648, 11_966, 192),
        ("conv4", COLOUR, 10, {}, 113_088, 2_570, 256),
        ("conv4", GREY, 10, {}, 111_936, 650, 64),
        ("conv4", COLOUR, 10, {"bn": "stats"}, 113_088, 2_570, 256),
        ("conv4", COLOUR, 10, {"bn": "none"}, 113_088 - 512, 2_570, 256),
        ("akd-cnn", COLOUR, 10, {}, 27_168, 17_098, 256),
        ("akd-cnn", COLOUR, 10, {"head_depth": "all_fc"}, 27_168, 17_098, 256),
        ("akd-cnn", COLOUR, 10, {"head_depth": "last"}, 43_616, 650, 64),
        ("akd-cnn-text", COLOUR, 10, {}, 43_616, 650, 64),
        ("akd-cnn-text", GREY, 10, {}, 160 + 8_224 + 18_496 + 4_160, 650, 64),  # one pixel of 64 channels is left
        ("akd-cnn", GREY, 10, {}, 115_776, 1_290, 128),
        ("akd-cnn", GREY, 10, {"head_depth": "all_fc"}, 13_248, 103_818, 800),
        ("resnet18", COLOUR, 100, {}, 11_168_832, 51_300, 512),
        ("resnet18-gn", COLOUR, 100, {}, 11_168_832, 51_300, 512),
        ("mobilenet", COLOUR, 10, {}, 338_496, 3_850, 384),
        ("vit-tiny", COLOUR, 10, {}, 6 * (12 * 192**2 + 13 * 192) + 49 * 192 + 64 * 192 + 2 * 192, 1_930, 192),
        ("vit-tiny", GREY, 10, {"depth": 1, "patch": 7}, 12 * 192**2 + 13 * 192 + 50 * 192 + 18 * 192, 1_930, 192),
        ("cnn1d", (3, 128), 10, {}, (15 + 3) * 32 + (160 + 3) * 64 + (320 + 3) * 128, 1_290, 128),
        ("lstm", (128, 9), 10, {}, 4 * 128 * (9 + 128 + 2), 1_290, 128),
        ("lstm", (128, 9), 10, {"hidden": 8}, 4 * 8 * (9 + 8 + 2), 90, 8),
        ("transformer", (128, 9), 10, {}, 4 * (12 * 128**2 + 13 * 128) + (10 + 128 + 2) * 128, 1_290, 128),
        ("linear", (30,), 2, {}, 0, 62, 30),
        ("mlp", (30,), 2, {}, 6_144, 130, 64),
        ("mlp", (30,), 2, {"hidden": 8}, 320, 18, 8),
    ],
)
def test_sizes(
    name: str,
    shape: tuple[int, ...],
    classes: int,
    options: dict[str, object],
    encoder: int,
    head: int,
    dim: int,
) -> None:
    network = build(name, shape, classes, seed=0, **options)
    assert (count(network.encoder), count(network.head)) == (encoder, head)
    assert {n for n, _ in network.named_children()} == {"encoder", "head"}
    x = torch.randn(2, *shape)
    z = network.encoder(x)
    assert z.shape == (2, dim)
    assert network.head(z).shape == (2, classes)
    assert network(x).shape == (2, classes)


@pytest.mark.parametrize("name", ["cnn", "convnet", "conv4", "akd-cnn", "resnet18", "linear", "mlp"])
@pytest.mark.parametrize("shape", [(3, 64, 48), (2, 33, 32), (1, 16, 20)])
def test_other_images(name: str, shape: tuple[int, ...]) -> None:
    assert build(name, shape, 4, seed=0)(torch.randn(2, *shape)).shape == (2, 4)


def test_layers_of_the_resnet() -> None:
    network = build("resnet18", COLOUR, 100, seed=0)
    strides = [m.stride[0] for m in network.modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3)]
    assert strides == [1] * 5 + [2, 1, 1, 1] * 3
    assert sum(b.numel() for b in network.buffers()) == 9_600  # running means and variances, no counters


# Seeds


@pytest.mark.parametrize("name", sorted(MODELS))
def test_weights_depend_on_the_seed_only(name: str) -> None:
    shape = SERIES.get(name, COLOUR)
    first = build(name, shape, 10, seed=3).state_dict()
    torch.rand(7)
    second, other = build(name, shape, 10, seed=3).state_dict(), build(name, shape, 10, seed=4).state_dict()
    assert all(torch.equal(first[k], second[k]) for k in first)
    assert any(not torch.equal(first[k], other[k]) for k in first)


def test_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    build("cnn", GREY, 10, seed=1)
    assert torch.equal(before, torch.get_rng_state())


# Order of pooling and activation


@pytest.mark.parametrize("activation", [nn.LeakyReLU(0.01), nn.ReLU()])
def test_pooling_and_activation_may_change_places(activation: nn.Module) -> None:
    torch.manual_seed(0)
    conv, pool = nn.Conv2d(3, 8, 5, dtype=torch.float64), nn.MaxPool2d(2)
    x = torch.randn(4, 3, 20, 20, dtype=torch.float64, requires_grad=True)
    ours, papers = activation(pool(conv(x))), pool(activation(conv(x)))
    assert torch.equal(ours, papers)
    weights = torch.randn_like(ours)
    inputs = (x, conv.weight, conv.bias)
    for a, b in zip(
        torch.autograd.grad((ours * weights).sum(), inputs),
        torch.autograd.grad((papers * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


# Many at once


def loss(network: nn.Module, parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(functional_call(network, (parameters, buffers), (x,)), y)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [
        ("akd-cnn", (3, 24, 24), {}),
        ("akd-cnn", (3, 24, 24), {"head_depth": "last"}),
        ("akd-cnn", (1, 16, 16), {}),
        ("cnn", (1, 16, 16), {}),
        ("cnn", (3, 16, 16), {}),
        ("conv4", (3, 16, 16), {"bn": "none"}),
        ("conv4", (3, 16, 16), {"bn": "nostats"}),
        ("conv4", (3, 16, 16), {"bn": "stats"}),
        ("convnet", (3, 16, 16), {}),
        ("linear", (12,), {}),
        ("mlp", (12,), {}),
        ("resnet18", (3, 8, 8), {}),
    ],
)
def test_stacked_equals_one_by_one(name: str, shape: tuple[int, ...], options: dict[str, object]) -> None:
    networks = [build(name, shape, 5, seed=i, **options).double() for i in range(3)]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 6, *shape, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 5, (3, 6), generator=generator)
    parameters, buffers = stack_module_state(networks)
    parameters = {k: p.detach() for k, p in parameters.items()}
    buffers = {k: b.clone() for k, b in buffers.items()}

    def gradient(p: dict[str, Tensor], b: dict[str, Tensor], x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return grad(lambda p: loss(networks[0], p, b, x, y))(p)

    stacked = vmap(gradient)(parameters, buffers, x, y)
    for i, network in enumerate(networks):
        cross_entropy(network(x[i]), y[i]).backward()
        for key, parameter in network.named_parameters():
            torch.testing.assert_close(stacked[key][i], parameter.grad, rtol=1e-9, atol=1e-11)
        for key, buffer in network.named_buffers():  # the running statistics of this batch
            torch.testing.assert_close(buffers[key][i], buffer, rtol=1e-12, atol=1e-12)


# BatchNorm


def norms(network: nn.Module) -> list[nn.BatchNorm2d]:
    return [m for m in network.modules() if isinstance(m, nn.BatchNorm2d)]


@pytest.mark.parametrize(("name", "options"), [("resnet18", {}), ("conv4", {"bn": "stats"}), ("conv4", {})])
def test_no_counters(name: str, options: dict[str, object]) -> None:
    network = build(name, (3, 16, 16), 5, seed=0, **options)
    assert norms(network)
    assert all(norm.num_batches_tracked is None for norm in norms(network))
    assert not [key for key in network.state_dict() if "num_batches_tracked" in key]


def test_batch_statistics_in_testing_too() -> None:
    network = build("conv4", (3, 16, 16), 5, seed=0)
    x = torch.randn(4, 3, 16, 16)
    assert not list(network.buffers())
    trained = network.train()(x)
    assert torch.equal(trained, network.eval()(x))
    assert not torch.allclose(trained[:2], network(x[:2]))


def test_running_statistics_in_testing() -> None:
    network = build("conv4", (3, 16, 16), 5, seed=0, bn="stats")
    x = torch.randn(4, 3, 16, 16)
    network.train()(x)
    network.eval()
    torch.testing.assert_close(network(x)[:2], network(x[:2]))


def test_without_batch_norm() -> None:
    assert not norms(build("conv4", (3, 16, 16), 5, seed=0, bn="none"))


# What is refused


def test_unknown_name() -> None:
    with pytest.raises(CoterieError, match="unknown model 'resnet81': did you mean 'resnet18'"):
        build("resnet81", COLOUR, 10, seed=0)


@pytest.mark.parametrize(
    ("name", "channels", "smallest"),
    [("cnn", 1, 12), ("cnn", 3, 16), ("convnet", 3, 16), ("conv4", 3, 16), ("akd-cnn", 1, 12), ("akd-cnn", 3, 24)],
)
def test_smallest_images(name: str, channels: int, smallest: int) -> None:
    shape = (channels, smallest, smallest)
    assert build(name, shape, 3, seed=0)(torch.randn(2, *shape)).shape == (2, 3)
    message = f"'{name}' takes images C x H x W of at least {smallest} x {smallest} pixels"
    with pytest.raises(CoterieError, match=message):
        build(name, (channels, smallest, smallest - 1), 3, seed=0)


@pytest.mark.parametrize(
    "name",
    ["akd-cnn", "akd-cnn-text", "cnn", "conv4", "convnet", "mobilenet", "resnet18", "resnet18-gn", "unet", "vit-tiny"],
)
@pytest.mark.parametrize("shape", [(30,), (32, 32), (3, 0, 32), (0, 32, 32)])
def test_samples_that_are_no_images(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(CoterieError, match=rf"'{name}' takes images C x H x W .* not samples of shape \({shape[0]}"):
        build(name, shape, 10, seed=0)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("conv4", {"bn": "layer"}, "none, nostats or stats, got 'layer'"),
        ("akd-cnn", {"head_depth": "first"}, "last or all_fc, got 'first'"),
        ("mlp", {"hidden": 0}, "at least 1 hidden unit"),
        ("cnn", {"hidden": 3}, "model 'cnn': .*'hidden'"),
    ],
)
def test_impossible_options(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(CoterieError, match=message):
        build(name, COLOUR, 10, seed=0, **options)


def test_no_numbers_and_no_classes() -> None:
    with pytest.raises(CoterieError, match="one or more numbers"):
        build("linear", (), 2, seed=0)
    with pytest.raises(CoterieError, match="at least 1 class"):
        build("linear", (3,), 0, seed=0)


# Networks of the user

OWN = """
import torch
from torch import nn

class Shaped(nn.Sequential):
    def __init__(self, shape, classes):
        super().__init__(nn.Flatten(), nn.Linear(shape[0], classes))

class Fixed(nn.Sequential):
    def __init__(self, hidden=3, bias=True):
        super().__init__(nn.Linear(4, hidden, bias=bias), nn.Linear(hidden, 2))

class Three(nn.Module):
    def __init__(self, a, b, c):
        super().__init__()

def number():
    return 3

name = "cnn"
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_networks.py").write_text(OWN)
    (tmp_path / "broken_networks.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_networks", raising=False)
    return "own_networks"


def test_own_networks(own: str) -> None:
    assert build(f"{own}:Shaped", (4,), 2, seed=0)(torch.ones(1, 4)).shape == (1, 2)
    fixed = [build(f"{own}:Fixed", (4,), 2, seed=5) for _ in range(2)]
    assert torch.equal(fixed[0][0].weight, fixed[1][0].weight)
    assert build(f"{own}:Fixed", (4,), 2, seed=5, hidden=7)[0].out_features == 7


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere_at_all:Net", "cannot import model 'nowhere_at_all:Net': ModuleNotFoundError: No module"),
        ("own_networks:Missing", "cannot import .*Missing"),
        ("own_networks:", "cannot import"),
        (":Net", "cannot import"),
        ("broken_networks:Net", "cannot import .*division"),
        ("own_networks:name", "is a str, not a class or function"),
        ("own_networks:number", "returns a int, not a torch.nn.Module"),
        ("own_networks:Three", "missing a required .*argument"),
    ],
)
@pytest.mark.usefixtures("own")
def test_own_networks_that_fail(path: str, message: str) -> None:
    with pytest.raises(CoterieError, match=message):
        build(path, (4,), 2, seed=0)
