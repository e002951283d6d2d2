"""Without a GPU, run the interpreted Triton kernels of the operations instead of their CPU references."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from coterie.gpu import convolution, dense, loss, norm, optimizers, sampling

OPERATIONS = [
    dense.dense,
    dense.dense_gradient,
    convolution.conv_pool,
    convolution.conv_pool_gradient,
    loss.cross_entropy,
    loss.cross_entropy_gradient,
    loss.masked_mean,
    loss.masked_mean_gradient,
    norm.masked_batch_norm,
    norm.batch_norm_gradient,
    sampling.draw,
    optimizers.sgd_step,
    optimizers.adam_step,
]


@pytest.fixture
def interpreted() -> Iterator[None]:
    with ExitStack() as stack:
        if not torch.cuda.is_available():
            for operation in OPERATIONS:
                stack.enter_context(operation.op.set_kernel_enabled("cpu", False))
        yield
