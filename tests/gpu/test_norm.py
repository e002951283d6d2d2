"""The fused BatchNorm that leaves padding out: against torch's own on the real samples of each client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap

from coterie.core import ops, padding
from coterie.gpu import norm
from coterie.gpu.kernels import norm as kernels
from coterie.gpu.operations import Fused

pytestmark = pytest.mark.usefixtures("interpreted")
CHANNELS = 3
SHAPES = [(6, CHANNELS), (6, CHANNELS, 7), (6, CHANNELS, 4, 5)]
REAL = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 0, 1, 1, 0, 1], [0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 0]]).bool()
SOME = (0, 1, 3)  # clients of whom a sample is real


@pytest.fixture(autouse=True)
def fused() -> Iterator[None]:
    with ops.use(Fused()):
        yield


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def passed(
    real: Tensor, x: Tensor, given: tuple[Tensor | None, ...], running: tuple[Tensor, ...], **settings: Any
) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """What comes out; gradients in x, weight, bias of a loss that sees real samples only; running statistics."""
    some = [i for i, t in enumerate(given) if t is not None]

    def loss(x: Tensor, *weights: Tensor) -> tuple[Tensor, tuple[Tensor, tuple[Tensor, ...]]]:
        affine = [weights[some.index(i)] if i in some else None for i in range(2)]
        written = tuple(t.clone() for t in running)
        out = padding.batch_norm(real, x, *written, *affine, training=True, **settings)
        kept = torch.where(real.view(-1, *[1] * (x.ndim - 1)), out, 0.0)
        return kept.pow(3).sum(), (out, written)

    weights = [given[i] for i in some]
    slopes, (out, written) = grad(loss, argnums=tuple(range(1 + len(some))), has_aux=True)(x, *weights)
    return out, slopes, written


def truth(
    real: Tensor, x: Tensor, given: tuple[Tensor | None, ...], running: tuple[Tensor, ...], **settings: Any
) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The same of the real samples alone, by torch."""
    leaves = [t.clone().requires_grad_() for t in (x[real], *given) if t is not None]
    affine = leaves[1:] or [None, None]
    written = tuple(t.clone() for t in running)
    out = F.batch_norm(leaves[0], *written, *affine, training=True, **settings)
    return out.detach(), torch.autograd.grad(out.pow(3).sum(), leaves), written


def assert_true(made: Any, expected: Any, real: Tensor, client: int) -> None:
    out, (x, *slopes), written = made
    ours = (out[client][real], x[client][real], *(t[client] for t in (*slopes, *written)))
    padded = x[client][~real]
    value, (first, *rest), statistics = expected
    torch.testing.assert_close(ours, (value, first, *rest, *statistics), rtol=1e-12, atol=1e-12)
    assert not padded.any()  # the loss does not see it


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
def test_it_does_what_torch_does_with_the_real_samples(shape: tuple[int, ...], affine: bool) -> None:
    """Clients side by side: all samples real, some, none."""
    x = 3 * random(4, *shape) + 2
    given = (random(4, CHANNELS), random(4, CHANNELS)) if affine else (None, None)
    running = random(4, CHANNELS), random(4, CHANNELS).abs()
    dims = (0, 0, (0, 0) if affine else None, 0)
    settings = {"momentum": 0.3, "eps": 0.1}
    made = vmap(lambda *args: passed(*args, **settings), in_dims=dims)(REAL, x, given, running)
    assert all(t.isfinite().all() for t in (made[0], *made[1], *made[2]))
    for i in SOME:
        own = tuple(None if t is None else t[i] for t in given)
        expected = truth(REAL[i], x[i], own, tuple(t[i] for t in running), **settings)
        assert_true(made, expected, REAL[i], i)


def test_where_none_is_real_all_count() -> None:
    x, scale, shift = random(6, CHANNELS, 5), random(CHANNELS), random(CHANNELS)
    made, mean, var = norm.batch_norm(torch.zeros(6).bool(), x, scale, shift, 1e-5)
    torch.testing.assert_close(made, F.batch_norm(x, None, None, scale, shift, True), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(mean, x.mean((0, 2)), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(var, x.var((0, 2)), rtol=1e-12, atol=1e-12)


def test_one_sample_of_one_pixel_is_finite() -> None:
    out, mean, var = norm.batch_norm(torch.ones(1).bool(), random(1, CHANNELS, 1), None, None, 1e-5)
    assert not out.any()
    assert not var.any()
    assert bool(mean.isfinite().all())


@pytest.mark.parametrize("bias", [True, False])
def test_padding_hands_its_gradient_on(bias: bool) -> None:
    """A loss that sees all samples, as the plain way has it."""
    x, real, scale = random(6, CHANNELS, 4), REAL[1], random(CHANNELS)
    shift = random(CHANNELS) if bias else None
    found = []
    for normalise in (norm.batch_norm, ops.Operations().masked_batch_norm):
        leaves = [t.clone().requires_grad_() for t in (x, scale, shift) if t is not None]
        out = normalise(real, *leaves, *[None] * (not bias), 1e-5)[0]  # type: ignore[arg-type]
        found.append((out.detach(), torch.autograd.grad(out.pow(3).sum(), leaves)))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shared", ["nothing", "x", "weights"])
def test_several_models_of_each_client(shared: str) -> None:
    """Three clients with two models each, who see the same samples or have the same weights."""
    x, weights = random(3, 2, 6, CHANNELS, 4), random(2, 3, 2, CHANNELS)
    real, running = REAL[list(SOME)], (random(3, 2, CHANNELS), random(3, 2, CHANNELS).abs())
    inner = (None, None if shared == "x" else 0, None if shared == "weights" else 0, 0)
    outer = (0, 0, None if shared == "weights" else 0, 0)
    samples = x[:, 0] if shared == "x" else x
    given = tuple(t[0, 0] if shared == "weights" else t for t in weights)
    made = vmap(vmap(passed, in_dims=inner), in_dims=outer)(real, samples, given, running)
    for i in range(3):
        for j in range(2):
            own = given if shared == "weights" else tuple(t[i, j] for t in given)
            batch = x[i, 0] if shared == "x" else x[i, j]
            expected = truth(real[i], batch, own, tuple(t[i, j] for t in running))
            out, slopes, written = made
            client = out[i], tuple(t[i] for t in slopes), tuple(t[i] for t in written)
            assert_true(client, expected, real[i], j)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 0, 2, 3), (0, 1, 3, 2), (1, 3, 0, 2)], ids=str)
def test_any_order_in_memory_is_read_and_kept(order: tuple[int, ...]) -> None:
    x, real = random(4, 6, CHANNELS, 40), REAL
    lies = x.permute(order).contiguous().permute(*(order.index(i) for i in range(4)))
    assert torch.equal(lies, x)
    for given in (lies, x.repeat_interleave(2, 3)[..., ::2], x[:1].expand_as(x)):
        leaf = given.detach().requires_grad_()
        out, *_ = norm.masked_batch_norm(leaf, real, None, None, 1e-5)
        (slope,) = torch.autograd.grad(out.pow(3).sum(), leaf)
        again = given.contiguous().requires_grad_()
        expected, *_ = norm.masked_batch_norm(again, real, None, None, 1e-5)
        (wanted,) = torch.autograd.grad(expected.pow(3).sum(), again)
        torch.testing.assert_close((out, slope), (expected, wanted), rtol=1e-12, atol=1e-12)
        if given is lies:
            assert out.stride() == slope.stride() == lies.stride()


def test_more_pixels_than_a_tile_has() -> None:
    length = 2 * kernels.TILE + 3
    x, real = 100 + random(1, 2, 1, length).float(), torch.tensor([[True, True]])
    leaf, again = (t.clone().requires_grad_() for t in (x, x[0].double()))
    out, mean, unbiased, *_ = norm.masked_batch_norm(leaf, real, None, None, 1e-5)
    expected = F.batch_norm(again, None, None, training=True)
    torch.testing.assert_close(out[0].double(), expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(mean.double(), x.double().mean((1, 3)), rtol=1e-6, atol=0)
    torch.testing.assert_close(unbiased.double(), x.double().var((1, 3)), rtol=1e-5, atol=0)
    slopes = torch.autograd.grad(out.pow(3).sum(), leaf) + torch.autograd.grad(expected.pow(3).sum(), again)
    torch.testing.assert_close(slopes[0][0].double(), slopes[1], rtol=0, atol=1e-3)


def test_half_precision_counts_in_single() -> None:
    x = 100 + 10 * torch.randn(6, CHANNELS, 4, 5).bfloat16()
    given = torch.rand(CHANNELS), torch.rand(CHANNELS)
    found = padding.batch_norm(REAL[1], x, None, None, *given, training=True)
    assert found.dtype == torch.bfloat16
    expected = F.batch_norm(x[REAL[1]].float(), None, None, *given, training=True)
    torch.testing.assert_close(found[REAL[1]].float(), expected, rtol=0.01, atol=0.01)
