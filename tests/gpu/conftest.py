"""Without a GPU, run the interpreted Triton kernels of the operations instead of their CPU references."""

from __future__ import annotations

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
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        for operation in OPERATIONS:
            monkeypatch.setattr(operation, "on_cpu", operation.kernel)
