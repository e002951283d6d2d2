"""Fused dense layers against torch's own, in value and gradient. Without a GPU, Triton interprets them."""

from __future__ import annotations

import copy
from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from coterie.core.data import Transform
from coterie.core.model import make_model
from coterie.core.tree import Tree
from coterie.gpu.fusion import FusedLinear, fuse, fuse_dense

pytestmark = pytest.mark.usefixtures("interpreted")
ACTIVATIONS = [nn.ReLU(), nn.LeakyReLU(0.2), None]


def layers(activation: nn.Module | None, inputs: int = 3, outputs: int = 5) -> tuple[nn.Module, nn.Module]:
    """The same, fused and plain."""
    plain = nn.Sequential(nn.Linear(inputs, outputs), *[activation] * (activation is not None)).double()
    return fuse_dense(copy.deepcopy(plain)), plain


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def weights(*stack: int, inputs: int = 3, outputs: int = 5) -> Tree:
    return {"0.weight": random(*stack, outputs, inputs), "0.bias": random(*stack, outputs)}


def passed(layer: nn.Module, w: Tree, x: Tensor) -> tuple[Tensor, Tensor, Tree]:
    """What comes out, and the gradient in x and the weights of a loss of which every output has its own."""

    def loss(x: Tensor, w: Tree) -> tuple[Tensor, Tensor]:
        out = functional_call(layer, w, (x,))
        return out.pow(3).sum(), out

    (in_x, in_w), out = grad(loss, argnums=(0, 1), has_aux=True)(x, w)
    return out, in_x, in_w


def assert_same(made: tuple[Tensor, Tensor, Tree], expected: tuple[Tensor, Tensor, Tree]) -> None:
    for a, b in zip((*made[:2], *made[2].values()), (*expected[:2], *expected[2].values()), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-12)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shared", [True, False], ids=["one network", "own networks"])
def test_clients_side_by_side(activation: nn.Module | None, shared: bool) -> None:
    w, dim = (weights(), None) if shared else (weights(4), 0)
    x = random(4, 6, 3)
    made, expected = (
        vmap(lambda w, x, layer=layer: passed(layer, w, x), in_dims=(dim, 0))(w, x) for layer in layers(activation)
    )
    assert_same(made, expected)


@pytest.mark.parametrize("own", [True, False], ids=["own networks", "samples one by one"])
def test_two_axes(own: bool) -> None:
    """Several networks of each client see its samples; or each sample is seen alone by its client's network."""
    w, x, dims = (weights(3, 2), random(3, 4, 3), (0, None)) if own else (weights(3), random(3, 2, 1, 3), (None, 0))
    made, expected = (
        vmap(vmap(lambda w, x, layer=layer: passed(layer, w, x), in_dims=dims))(w, x) for layer in layers(nn.ReLU())
    )
    assert_same(made, expected)


def test_more_outputs_and_samples_than_a_tile_has() -> None:
    w, x = weights(2, inputs=2, outputs=135), random(2, 70, 2)
    made, expected = (vmap(lambda w, x, layer=layer: passed(layer, w, x))(w, x) for layer in layers(nn.ReLU(), 2, 135))
    assert_same(made, expected)


@pytest.mark.parametrize("activation", [nn.ReLU(), None])
@pytest.mark.parametrize("frozen", [("x",), ("0.weight", "0.bias"), ("0.bias",), ("x", "0.weight")])
def test_what_is_frozen_is_left_alone(activation: nn.Module | None, frozen: tuple[str, ...]) -> None:
    w, x = weights(), random(4, 3)
    given = {n: t.requires_grad_(n not in frozen) for n, t in {**w, "x": x}.items()}
    trained = [t for n, t in given.items() if n not in frozen]
    made, expected = (
        torch.autograd.grad(functional_call(layer, w, (x,)).pow(3).sum(), trained) for layer in layers(activation)
    )
    for a, b in zip(made, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_samples_may_have_more_axes() -> None:
    given = weights(), random(2, 4, 3)
    made, expected = (passed(layer, *given) for layer in layers(nn.LeakyReLU()))
    assert made[0].shape == (2, 4, 5)
    assert_same(made, expected)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_is_not_finite_comes_out_as_of_torch(activation: nn.Module | None) -> None:
    inf, nan = torch.inf, torch.nan
    w = {"0.weight": torch.ones(1, 1, dtype=torch.float64), "0.bias": torch.zeros(1, dtype=torch.float64)}
    x = torch.tensor([[inf], [-inf], [nan], [0.0], [-0.0]], dtype=torch.float64)
    made, expected = (functional_call(layer, w, (x,)) for layer in layers(activation, 1, 1))
    torch.testing.assert_close(made, expected, rtol=0, atol=0, equal_nan=True)


def test_half_precision_is_that_of_products_only() -> None:
    """By float16, which can be interpreted."""
    w, x = ({n: t.float() for n, t in weights().items()}, random(6, 3).float())
    for layer in layers(nn.ReLU()):
        with torch.autocast("cpu", torch.float16):
            out = functional_call(layer, w, (x,))
        assert out.dtype == torch.float16
    fused, plain = layers(nn.ReLU())

    def loss(w: Tree, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16, cache_enabled=False):
            return functional_call(fused, w, (x,)).float().pow(2).sum()

    made = grad(loss)(w, x)
    expected = grad(lambda w: functional_call(plain, w, (x,)).pow(2).sum())(w)
    for name, value in expected.items():
        assert made[name].dtype == torch.float32
        assert float((made[name] - value).norm() / value.norm()) < 0.01


class Doubled(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)  # type: ignore[no-any-return]


def test_a_chain_keeps_its_names_and_what_does_not_fit() -> None:
    relu, twice = nn.ReLU(), nn.Linear(4, 4)
    plain = nn.Sequential(
        OrderedDict(
            first=nn.Linear(3, 4), a=relu, bare=nn.Linear(4, 4, bias=False), b=relu, one=twice, c=relu, two=twice,
            inner=nn.Sequential(nn.Linear(4, 4), nn.LeakyReLU(-0.5), nn.Linear(4, 4), nn.Tanh()),
            own=Doubled(nn.Linear(4, 4), relu), last=nn.Linear(4, 2),
        )
    ).double()  # fmt: skip
    made = fuse_dense(copy.deepcopy(plain))
    kinds = {name for name, module in made.named_modules() if type(module) is FusedLinear}
    assert kinds == {"first", "one", "two", "inner.0", "inner.2", "last"}
    start = {n: random(*p.shape) for n, p in plain.named_parameters()}
    assert {n for n, _ in made.named_parameters()} == start.keys()
    x = random(5, 3)
    assert_same(passed(made, start, x), passed(plain, start, x))


def test_a_model_without_convolutions_still_normalises_its_samples() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    model = make_model(network, (2, 2, 2), 3, Transform((0.4, 0.5), (0.2, 0.3)))
    x = torch.randint(0, 256, (5, 2, 2, 2), dtype=torch.uint8)
    torch.testing.assert_close(fuse(model)(model.start, x), model(model.start, x), rtol=0, atol=1e-13)


def test_what_is_not_as_torch_has_it_is_left_alone() -> None:
    """Hooks that would not be called, and activations with a forward of their own."""

    class Clipped(nn.ReLU):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).clamp_max(0.1)

    def heard(layer: nn.Module) -> nn.Module:
        layer.register_forward_hook(lambda module, given, out: 2 * out)
        return layer

    for chain in (
        [heard(nn.Linear(3, 5)), nn.ReLU()],
        [nn.Linear(3, 5), heard(nn.ReLU())],
        [nn.Linear(3, 5), Clipped()],
        [heard(nn.Linear(3, 5))],
    ):
        net, x = nn.Sequential(*chain).double(), random(4, 3)
        torch.testing.assert_close(fuse_dense(copy.deepcopy(net))(x), net(x))


def test_no_samples_have_no_gradient() -> None:
    made, expected = (passed(layer, w, torch.zeros(0, 3).double()) for w in [weights()] for layer in layers(nn.ReLU()))
    assert_same(made, expected)
