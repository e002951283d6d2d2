"""BatchNorm leaves out samples that only fill up a batch: it is the layer that would mix them with the real ones.

Who feeds a batch says which of its samples are real. The layers of a network stay those that torch has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from coterie.core import norm, stacks
from coterie.core.errors import CoterieError

_real: ContextVar[Tensor | None] = ContextVar("real", default=None)


@contextmanager
def known(real: Tensor | None) -> Iterator[None]:
    """Networks are given batches meanwhile of which these samples (B,) are real; None: all are."""
    token = _real.set(real)
    try:
        yield
    finally:
        _real.reset(token)


def left_out(widen: bool = False) -> AbstractContextManager[object]:
    """BatchNorm does not see padding meanwhile, if there is any. widen: it computes in single precision at least."""
    real = _real.get()
    return nullcontext() if real is None and not widen else RealOnly(real)


def is_left_out_by(layer: nn.Module) -> bool:
    """Whether padding cannot change what this layer does with real samples."""
    norm = isinstance(layer, nn.modules.batchnorm._NormBase)
    return not norm or type(layer).forward is nn.modules.batchnorm._BatchNorm.forward


class RealOnly(TorchFunctionMode):
    def __init__(self, real: Tensor | None) -> None:
        super().__init__()
        self.real = real  # (B,), or None: all are

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.batch_norm:
            return batch_norm(self.real, *args, **kwargs or {})
        return func(*args, **kwargs or {})


def batch_norm(
    real: Tensor | None,
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """F.batch_norm of x (B, C, ...), its statistics those of the real samples (B,).

    Where none is real all count: what comes out does not matter, but must be finite.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if real is None or not training:
        return F.batch_norm(wide, running_mean, running_var, weight, bias, training, momentum, eps).to(x.dtype)
    if len(x) != len(real):
        raise CoterieError(
            f"a BatchNorm of this network is given {len(x)} samples where the batch has {len(real)}, so it cannot be "
            "told which of them are padding; use clients=looped"
        )
    pixels = wide.reshape(*x.shape[:2], -1)
    normalise = norm.batch_norm if stacks.usable(x.device) else plain_batch_norm
    out, mean, var = normalise(real, pixels, weight, bias, eps)
    if running_mean is not None and running_var is not None:
        for running, new in ((running_mean, mean), (running_var, var)):
            running.mul_(1 - momentum).add_(new.detach(), alpha=momentum)
    return out.view(x.shape).to(x.dtype)


def plain_batch_norm(
    real: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """x (B, C, L) normalised, and mean and unbiased variance (C,) of its real samples (B,)."""
    counts = (real | ~real.any()).to(x.dtype)
    share = (counts / counts.sum())[:, None]  # (B, 1)
    var, mean = torch.var_mean(x, 2, correction=0)  # (B, C) of each sample
    middle = (share * mean).sum(0)  # (C,)
    spread = (share * (var + (mean - middle).square())).sum(0)
    n = counts.sum() * x.shape[2]
    scale = (spread + eps).rsqrt() if weight is None else (spread + eps).rsqrt() * weight
    shift = -middle * scale if bias is None else bias - middle * scale
    return torch.addcmul(shift[:, None], x, scale[:, None]), middle, spread * n / (n - 1).clamp_min(1)
