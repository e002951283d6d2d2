"""Register fused operations with torch.

An `Operation` is an op of torch in the namespace "coterie": a Triton kernel for CUDA, a reference in plain torch for
CPU and for fake tensors, and a vmap rule. Its tensors have a client axis c in front, and the axis v of a vmap joins it:
(v, c, ...) becomes (v c, ...), so that all clients share one launch. It is not a `torch.library.custom_op`, whose first
call imports torch's compiler: 894 modules, which take seconds.

Derivatives are a `torch.autograd.Function` around the custom op, not `register_autograd`: the function which that
generates has no `setup_context` and raises under `torch.func.grad`, which every stacked training step uses
(https://github.com/pytorch/pytorch/issues/168393).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, infer_schema, register_fake, register_vmap

from coterie.core.errors import CoterieError

LIBRARY: Any = Library("coterie", "FRAGMENT")  # type: ignore[no-untyped-call]
Rule = Callable[..., tuple[Any, Any]]  # (function, info, in_dims, *inputs) -> (outputs, out_dims)


def join(function: Callable[..., Any], info: Any, dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, Any]:
    """The vmap rule of operations whose tensors all have the client axis."""
    rows = (
        in_front(t, dim, info.batch_size).flatten(0, 1) if isinstance(t, Tensor) else t
        for t, dim in zip(inputs, dims, strict=True)
    )
    outputs = function(*rows)
    if isinstance(outputs, Tensor):
        return split_clients(outputs, info.batch_size), 0
    kind = type(outputs)  # a tuple or a list, and so are its dimensions
    return kind(split_clients(t, info.batch_size) for t in outputs), kind([0] * len(outputs))


def split_clients(t: Tensor, count: int) -> Tensor:
    """(v c, ...) as (v, c, ...), where v is count."""
    return t.view(count, len(t) // count, *t.shape[1:])


def in_front(t: Tensor, dim: int | None, count: int) -> Tensor:
    """Move the axis of a vmap to the front; expand a tensor that has none."""
    return t.expand(count, *t.shape) if dim is None else t.movedim(dim, 0)


def save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """The `setup_context` of operations without a derivative."""


def no_derivative(ctx: Any, *gradients: Any) -> Any:
    """The `backward` of gradients and SGD steps."""
    raise CoterieError("second derivatives are not available for stacked clients on a GPU; use backend=looped")


class Operation:
    """A custom op, differentiable under torch.func. Without `backward`, taking its derivative is an error.

    leading: number of inputs before a trailing list of tensors, which callers pass one by one: autograd does not track
    tensors inside lists.
    """

    def __init__(
        self,
        name: str,
        kernel: Callable[..., Any],
        reference: Callable[..., Any],
        *,
        vmap: Rule = join,
        setup_context: Callable[..., None] = save_nothing,
        backward: Callable[..., Any] = no_derivative,
        leading: int | None = None,
    ) -> None:
        self.name, self.leading, self.kernel, self.on_cpu = name, leading, kernel, reference
        LIBRARY.define(name + infer_schema(kernel, mutates_args=()), tags=(torch.Tag.pt2_compliant_tag,))
        LIBRARY.impl(name, kernel, "CUDA")
        LIBRARY.impl(name, lambda *inputs: self.on_cpu(*inputs), "CPU")
        register_fake(f"coterie::{name}", reference, lib=LIBRARY)
        register_vmap(f"coterie::{name}", partial(self._vmap_op, vmap), lib=LIBRARY)
        self.op = getattr(torch.ops.coterie, name).default
        rules: dict[str, Callable[..., Any]] = {
            "forward": self._forward,
            "setup_context": setup_context,
            "backward": backward,
            "vmap": partial(vmap, self),
        }
        self.function: Any = type(name, (torch.autograd.Function,), {n: staticmethod(f) for n, f in rules.items()})

    def __call__(self, *inputs: Any) -> Any:
        return self.function.apply(*inputs)

    def _forward(self, *inputs: Any) -> Any:
        outputs = self._call_op(*inputs)
        return tuple(outputs) if isinstance(outputs, list) else outputs

    def _call_op(self, *inputs: Any) -> Any:
        return self.op(*inputs) if self.leading is None else self.op(*packed(inputs, self.leading))

    def _vmap_op(self, vmap: Rule, info: Any, dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, Any]:
        if self.leading is not None:
            dims, inputs = (*dims[:-1], *dims[-1]), (*inputs[:-1], *inputs[-1])
        return vmap(self._call_op, info, dims, *inputs)


def packed(inputs: tuple[Any, ...], leading: int) -> tuple[Any, ...]:
    """The inputs after the first `leading` ones as one list."""
    return *inputs[:leading], list(inputs[leading:])
