"""BatchNorm without padding: the one layer that would mix padded samples with real ones.

`known` marks which samples of a batch are real; inside `left_out`, torch's BatchNorm uses only these. There, too, norms
of bf16 samples are computed in float32 where torch has no gradient for them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import _functorch as functorch
from torch.overrides import TorchFunctionMode

from coterie.core import ops
from coterie.core.context import holding
from coterie.core.errors import CoterieError

NORMS = (F.group_norm, F.layer_norm, F.instance_norm)
CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)
_real: ContextVar[Tensor | None] = ContextVar("real", default=None)


def known(real: Tensor | None) -> AbstractContextManager[Tensor | None]:
    """Mark which samples (B,) are real while the network runs; None: all are."""
    return holding(_real, real)


def real_steps(x: Tensor, padding: float) -> Tensor:
    """(B, T) which steps of series (B, T, ...) are not padding at the end; the first one always counts."""
    different = (x != padding).flatten(2).any(2)
    later = different.flip(1).cumsum(1).flip(1) > 0
    return later | (torch.arange(x.shape[1], device=x.device) == 0)


def left_out(widen: bool = False) -> AbstractContextManager[object]:
    """BatchNorm ignores padding inside this block. widen: normalize bf16 samples in float32 where torch requires it."""
    real = _real.get()
    return nullcontext() if real is None and not widen else RealOnly(real)


def is_left_out_by(layer: nn.Module) -> bool:
    """Whether padding does not change this layer's output for real samples."""
    norm = isinstance(layer, nn.modules.batchnorm._NormBase)
    return not norm or type(layer).forward is nn.modules.batchnorm._BatchNorm.forward


class RealOnly(TorchFunctionMode):
    def __init__(self, real: Tensor | None) -> None:
        super().__init__()
        self.real = real  # (B,) mask of real samples; None: all are

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.batch_norm:
            return batch_norm(self.real, *args, **kwargs or {})
        if func in NORMS and args and isinstance(args[0], Tensor):
            args = (widened(args[0]), *args[1:])
        if func in CONVOLUTIONS and len(args) > 2 and args[2] is not None:
            args = lowered(*args)
        return func(*args, **kwargs or {})


def lowered(x: Tensor, weight: Tensor, bias: Tensor, *more: Any) -> tuple[Any, ...]:
    """The arguments of a convolution in autocast's type. Under vmap with shared weights it leaves the bias as it is."""
    kind = weight.device.type
    if not torch.is_autocast_enabled(kind) or weight.dtype == torch.float64:
        return x, weight, bias, *more
    dtype = torch.get_autocast_dtype(kind)
    return x.to(dtype), weight.to(dtype), bias.to(dtype), *more


def widened(x: Tensor) -> Tensor:
    """Cast the input of a norm to float32 if torch cannot differentiate it in bf16; the output is float32, too."""
    return x if takes_bf16(x) else x.to(torch.promote_types(x.dtype, torch.float32))


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
    """F.batch_norm of x (B, C, ...) with the statistics of the real samples (B,).

    If none is real all count: the result is not used, but must be finite.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if real is None or not training:
        wide = x if takes_bf16(x) else wide
        return F.batch_norm(wide, running_mean, running_var, weight, bias, training, momentum, eps).to(x.dtype)
    if len(x) != len(real):
        raise CoterieError(
            f"a BatchNorm of this network is given {len(x)} samples where the batch has {len(real)}, so it is "
            "unknown which of them are padding; use backend=looped"
        )
    pixels = wide.reshape(*x.shape[:2], -1)
    out, mean, var = ops.current().masked_batch_norm(real, pixels, weight, bias, eps)
    if running_mean is not None and running_var is not None:
        for running, new in ((running_mean, mean), (running_var, var)):
            running.mul_(1 - momentum).add_(new.detach(), alpha=momentum)
    return out.view(x.shape).to(x.dtype)


def takes_bf16(x: Tensor) -> bool:
    """Whether torch has a gradient of norms for bf16 samples and float32 weights.

    Neither the CPU nor vmap does: the rule of vmap multiplies the bf16 gradient by the float32 weight, and then calls a
    kernel that requires bf16.
    """
    return x.is_cuda and not functorch.is_functorch_wrapped_tensor(x)
