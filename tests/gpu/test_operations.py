"""Every fused operation as torch sees it: schema, fake implementation, CPU reference against kernel, vmap rule."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from coterie.core.errors import CoterieError
from coterie.gpu import convolution, dense, loss, norm, optimizers, sampling
from coterie.gpu.registration import Operation, packed
from tests.gpu.conftest import OPERATIONS

Inputs = tuple[Any, ...]


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def convolved(c: int) -> tuple[Inputs, tuple[Tensor, ...]]:
    """Inputs of a convolution of 3 x 3 on two raw images of 7 x 8 pixels, and what comes out."""
    x = torch.randint(0, 256, (c, 2, 2, 7, 8), dtype=torch.uint8)
    form = random(2), random(2).abs() + 0.5, 1, 0.01, torch.float64
    inputs = x, random(c, 3, 2, 3, 3), random(c, 3), *form
    return inputs, convolution.conv_pool(*inputs)


def conv_gradient(c: int) -> Inputs:
    _, outputs = convolved(c)
    return random(*outputs[0].shape), *outputs, [7, 8, 2, 3, 1], 0.01, torch.float64, True


def normalized(c: int) -> tuple[Inputs, tuple[Tensor, ...]]:
    real = torch.rand(c, 4) < 0.6
    real[0, 0], real[-1] = True, False
    inputs = random(c, 4, 3, 5), real, random(c, 3), random(c, 3), 0.1
    return inputs, norm.masked_batch_norm(*inputs)


def norm_gradient(c: int) -> Inputs:
    (x, _, weight, *_), (_, mean, _, inverse, share) = normalized(c)
    return random(*x.shape), x, mean, inverse, share, weight


def step(c: int) -> Inputs:
    active = torch.arange(c) % 2 == 0
    return (
        torch.tensor(0.5).double(),
        active,
        0.2,
        0.01,
        0.9,
        2,
        *(random(c, *s) for _ in range(3) for s in ((3,), (2, 4))),
    )


def adam_step(c: int) -> Inputs:
    moments = (random(c, *s).abs() for _ in range(2) for s in ((3,), (2, 4)))
    tensors = (random(c, *s) for _ in range(2) for s in ((3,), (2, 4)))
    scales, active = torch.rand(c, 3, dtype=torch.float64) + 0.5, torch.arange(c) % 2 == 0
    return scales, active, 0.01, 0.8, 0.95, 1e-3, 2, *tensors, *moments


INPUTS: dict[Operation, Callable[[int], Inputs]] = {
    dense.dense: lambda c: (random(c, 4, 3), random(c, 5, 3), random(c, 5), 0.01),
    dense.dense_gradient: lambda c: (
        *(random(c, 4, 5), random(c, 4, 3), random(c, 5, 3), random(c, 4, 5)),
        *(0.01, torch.float64, [True, True, True]),
    ),
    convolution.conv_pool: lambda c: convolved(c)[0],
    convolution.conv_pool_gradient: conv_gradient,
    loss.cross_entropy: lambda c: (random(c, 4, 6), torch.randint(0, 6, (c, 4))),
    loss.cross_entropy_gradient: lambda c: (random(c, 4), random(c, 4, 6), torch.randint(0, 6, (c, 4))),
    loss.masked_mean: lambda c: (random(c, 4), torch.rand(c, 4) < 0.5),
    loss.masked_mean_gradient: lambda c: (random(c), torch.rand(c, 4) < 0.5),
    norm.masked_batch_norm: lambda c: normalized(c)[0],
    norm.batch_norm_gradient: norm_gradient,
    sampling.draw: lambda c: (
        torch.randint(0, 256, (c, 6, 3, 7, 8), dtype=torch.uint8),
        *(torch.randint(0, 6, (c, 5)), torch.randint(0, 2**62, (c, 5)), 2, True),
    ),
    optimizers.sgd_step: step,
    optimizers.adam_step: adam_step,
}
EACH = pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)


def op_inputs(operation: Operation, inputs: Inputs) -> Inputs:
    return inputs if operation.leading is None else packed(inputs, operation.leading)


def assert_close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@EACH
def test_schema_and_fake_implementation(operation: Operation) -> None:
    torch.library.opcheck(operation.op, op_inputs(operation, INPUTS[operation](2)))


@EACH
def test_the_kernel_computes_what_the_reference_does(operation: Operation, request: pytest.FixtureRequest) -> None:
    """And its outputs have the shapes, dtypes and strides of the fake implementation."""
    inputs = INPUTS[operation](3)
    expected = operation(*inputs)
    request.getfixturevalue("interpreted")
    assert_close(operation(*inputs), expected)
    kinds = ("test_schema", "test_faketensor")
    torch.library.opcheck(operation.op, op_inputs(operation, inputs), test_utils=kinds)


@EACH
@pytest.mark.parametrize("direct", [False, True], ids=["function", "op"])
def test_a_vmap_joins_the_clients(operation: Operation, direct: bool) -> None:
    """As the operation itself, and as the custom op called without it."""
    inputs = INPUTS[operation](3)
    one = operation.op if direct else operation
    shared = {convolution.conv_pool: {3, 4}, optimizers.sgd_step: {0}}.get(operation, set())  # mean and std; the rate
    batched = [i for i, t in enumerate(inputs) if isinstance(t, Tensor) and i not in shared]
    alone = operation in (optimizers.sgd_step, optimizers.adam_step)  # their tensors have no client axis before a vmap

    def single(*tensors: Tensor) -> Any:
        given = list(inputs)
        for i, t in zip(batched, tensors, strict=True):
            given[i] = t if alone else t[None]
        outputs = one(*(op_inputs(operation, tuple(given)) if direct else given))
        outputs = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
        return tuple(t if alone else t.squeeze(0) for t in outputs)

    expected = operation(*inputs)
    expected = (expected,) if isinstance(expected, Tensor) else tuple(expected)
    assert_close(vmap(single)(*(inputs[i] for i in batched)), expected)


@pytest.mark.parametrize("operation", [dense.dense_gradient, loss.masked_mean_gradient], ids=["dense", "mean"])
def test_second_derivatives_are_refused(operation: Operation) -> None:
    first, *rest = INPUTS[operation](2)

    def total(t: Tensor) -> Tensor:
        outputs = operation(t, *rest)
        return (outputs if isinstance(outputs, Tensor) else outputs[0]).square().sum()

    with pytest.raises(CoterieError, match="use backend=looped"):
        grad(total)(first)
    with pytest.raises(CoterieError, match="use backend=looped"):
        total(first.requires_grad_()).backward()


def test_operations_do_not_import_the_compiler() -> None:
    """Which takes seconds, in the first round."""
    steps = """if True:
        import sys
        import torch
        from coterie.gpu.loss import cross_entropy
        y = torch.tensor([[0, 1]])
        torch.vmap(lambda z: cross_entropy(z, y))(torch.zeros(3, 1, 2, 4))
        sys.exit("torch._dynamo" in sys.modules)
    """
    subprocess.run([sys.executable, "-c", steps], check=True, timeout=60)
