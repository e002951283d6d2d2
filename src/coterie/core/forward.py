"""Call a network, and take the one tensor of outputs from what it returns."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from coterie.core.errors import CoterieError
from coterie.core.packing import Inputs
from coterie.core.tree import Tree


def forward(network: nn.Module, x: Inputs, weights: Tree | None = None) -> Tensor:
    """The outputs (B, ...) of a network, with these weights instead of its own.

    Several inputs are passed by keyword if `forward` has parameters of their names, else as one dictionary.
    """
    args: tuple[Inputs, ...] = (x,)
    named: Tree = {}
    if isinstance(x, dict) and takes_names(network, tuple(x)):
        args, named = (), x
    made = network(*args, **named) if weights is None else functional_call(network, weights, args, named)
    return made if isinstance(made, Tensor) else only_tensor(made)


def takes_names(network: nn.Module, names: tuple[str, ...]) -> bool:
    """Whether the network takes several inputs by keyword (True) or as one dictionary; other networks are refused."""
    call: Callable[..., Any] = network.forward
    return by_keyword(getattr(call, "__func__", call), hasattr(call, "__func__"), names)


@lru_cache
def by_keyword(call: Callable[..., Any], method: bool, names: tuple[str, ...]) -> bool:
    """The rule for a `forward`. method: whether its first parameter is `self`."""
    parameters = list(inspect.signature(call).parameters.values())[1 if method else 0 :]
    plain = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    takes = {p.name for p in plain if p.kind is not p.POSITIONAL_ONLY}
    needs = [p.name for p in plain if p.default is p.empty]
    if not plain and any(p.kind is p.VAR_KEYWORD for p in parameters):
        return True  # it passes everything on, as wrappers do
    if takes.isdisjoint(names):
        if len(needs) <= 1 and plain and plain[0].kind is not plain[0].KEYWORD_ONLY:
            return False
    elif takes.issuperset(names) and set(names).issuperset(needs):
        return True
    own = ", ".join(p.name for p in plain) or "nothing"
    raise CoterieError(
        f"the model's forward takes {own}, the samples have the inputs {', '.join(names)}; name its "
        "parameters after the inputs (other parameters need defaults), or take one dictionary of inputs"
    )


def only_tensor(output: object) -> Tensor:
    """The one tensor of an output with several fields, such as the logits of a network of transformers."""
    tensors = {name: part for name, part in parts(output) if isinstance(part, Tensor)}
    if len(tensors) != 1:
        found = f" with the tensors {', '.join(tensors)}" if tensors else " without a tensor"
        raise CoterieError(
            f"the model returns {type(output).__name__}{found}; it must return one tensor of outputs: wrap it in a "
            "module whose forward returns the tensor to train on"
        )
    return next(iter(tensors.values()))


def parts(output: object) -> Iterable[tuple[str, object]]:
    """The fields of an output, by name."""
    if isinstance(output, Mapping):
        return output.items()
    if is_dataclass(output):
        return ((f.name, getattr(output, f.name)) for f in fields(output))
    if isinstance(output, tuple | list):
        return zip(getattr(output, "_fields", None) or map(str, range(len(output))), output, strict=True)
    return ()


@contextmanager
def attention_for_vmap(device: torch.device) -> Iterator[None]:
    """Attention as vmap computes it: by the parts of nn.TransformerEncoderLayer, and on a CPU as matrix products.

    vmap has no rule for torch's fused kernels of both.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH) if device.type == "cpu" else nullcontext():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
