"""The part of a server's state that its global model consists of: what devices need to evaluate it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from coterie.core import tree
from coterie.core.method import AnyMethod
from coterie.core.model import Model


class UsedTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which of these tensors are arguments of an operation."""

    def __init__(self, tensors: tree.Tree) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names = {id(t): name for name, t in tensors.items()}
        self.used: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_leaves((args, kwargs or {}))
        self.used |= {self.names[id(t)] for t in given if isinstance(t, Tensor) and id(t) in self.names}
        return func(*args, **(kwargs or {}))


def tensors_read(method: AnyMethod, model: Model, server: Any, x: Tensor) -> frozenset[str]:
    """Names of the tensors in the server's state that `server_predict` reads; empty if there is no global model."""
    separate = tree.apply(torch.clone, server)  # a tensor may be in the state twice
    with torch.no_grad(), UsedTensors(tree.flatten(separate)) as noted:
        found = method.server_predict(model, separate, x)
    return frozenset() if found is None else frozenset(noted.used)


def completed(template: Any, tensors: tree.Tree) -> Any:
    """The server's state with these tensors; floating-point values of all others are NaN, so none is used unnoticed."""

    def unknown(t: Tensor) -> Tensor:
        return torch.full_like(t, torch.nan) if t.is_floating_point() else t

    blank = {name: unknown(t) for name, t in tree.items(template)}
    return tree.fill(template, blank | tensors)
