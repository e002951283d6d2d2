"""What all fused functions have in common: an axis of clients, c, in front, which the axis of a vmap joins."""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch as functorch

from coterie.core.errors import CoterieError


def usable(device: torch.device) -> bool:
    """Whether Triton's kernels run there."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def current(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches its kernels on the current GPU: this one, meanwhile."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def side_by_side(t: Tensor) -> bool:
    """Whether they run there, and this is of several clients: one alone may be asked for second derivatives."""
    if not usable(t.device):
        return False
    while functorch.is_functorch_wrapped_tensor(t) and not functorch.is_batchedtensor(t):
        t = functorch.get_unwrapped(t)
    return functorch.is_batchedtensor(t)


def call(function: Any, *given: Any) -> Any:
    return function.apply(*given)


class Stacked(torch.autograd.Function):
    """A function of tensors that all have the axis of clients."""

    @classmethod
    def vmap(cls, info: Any, dims: tuple[Any, ...], *given: Any) -> Any:
        """The new axis v joins the axis of clients: (v, c, ...) becomes (v c, ...)."""
        rows = (
            in_front(t, dim, info.batch_size).flatten(0, 1) if isinstance(t, Tensor) else t
            for t, dim in zip(given, dims, strict=True)
        )
        made = call(cls, *rows)
        if isinstance(made, Tensor):
            return unfold_stack(made, info.batch_size), 0
        return tuple(unfold_stack(t, info.batch_size) for t in made), (0,) * len(made)


class Last(Stacked):
    """One that is never differentiated: a gradient, or a step."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise CoterieError("a GPU has no gradient of a gradient for clients side by side; use clients=looped")


def unfold_stack(t: Tensor, count: int) -> Tensor:
    """(v c, ...) as (v, c, ...)."""
    return t.view(count, len(t) // count, *t.shape[1:])


def in_front(t: Tensor, dim: int | None, count: int) -> Tensor:
    return t.expand(count, *t.shape) if dim is None else t.movedim(dim, 0)


def compute_type(weight: Tensor) -> torch.dtype:
    """Of products with it."""
    kind = weight.device.type
    lowered = torch.is_autocast_enabled(kind) and weight.dtype != torch.float64  # which autocast leaves alone
    return torch.get_autocast_dtype(kind) if lowered else weight.dtype
