"""Record what a method's prediction computes, and replay it with tensors that a module holds."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from coterie.core import tree
from coterie.core.model import Model
from coterie.core.tree import Live, Tree


@dataclass(frozen=True)
class InUse(Model):
    """A model whose BatchNorm and dropout follow its training mode, whichever weights the method passes."""

    training: bool = False
    ties: tuple[dict[str, str], dict[str, str]] = ({}, {})  # encoder's, head's: tied name -> name in the weights

    def features(self, encoder: Tree, x: Tensor) -> Tensor:
        return super().features(self.complete(encoder, self.ties[0]), x)

    def logits(self, head: Tree, z: Tensor) -> Tensor:
        return super().logits(self.complete(head, self.ties[1]), z)

    def complete(self, weights: Tree, ties: dict[str, str]) -> Tree:
        made = {**weights, **{other: weights[name] for other, name in ties.items()}}
        return Live(made) if self.training else made


@dataclass(frozen=True)
class Recorder(Model):
    """Records which weights it is called with."""

    encoders: list[Tree] = field(default_factory=list)
    heads: list[Tree] = field(default_factory=list)

    def features(self, encoder: Tree, x: Tensor) -> Tensor:
        self.encoders.append(encoder)
        return super().features(encoder, x)

    def logits(self, head: Tree, z: Tensor) -> Tensor:
        self.heads.append(head)
        return super().logits(head, z)


class Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records which tensors operations read."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= {id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        return func(*args, **(kwargs or {}))


def plain_fields(model: Model) -> dict[str, Any]:
    return {f.name: getattr(model, f.name) for f in fields(Model)}


def skeleton(module: nn.Module, weights: Tree) -> tuple[nn.Module, dict[str, str]]:
    """A copy without these weights, which are passed at every call; frozen parameters stay. Also the ties."""
    names: dict[int, str] = {}
    ties: dict[str, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if names.setdefault(id(parameter), name) != name and names[id(parameter)] in weights:
            ties[name] = names[id(parameter)]
    bare = copy.deepcopy(module)
    for name in (*weights, *ties):
        owner, _, last = name.rpartition(".")
        inner = bare.get_submodule(owner)
        (inner._parameters if last in inner._parameters else inner._buffers)[last] = None
    return bare, ties


def weights_in(parts: object, name: str = "") -> set[str]:
    """Dotted names of trainable tensors: floating-point tensors in dictionaries, except BatchNorm statistics.

    Methods keep weights in dictionaries by name, and everything else (labels, shares, features) in fields.
    """
    if isinstance(parts, dict):
        branches = {f"{name}.{key}" if name else key: value for key, value in parts.items()}
        own = {n for n, t in branches.items() if isinstance(t, Tensor) and t.is_floating_point()}
        return {n for n in own if not tree.is_statistic(n)}.union(*(weights_in(b, n) for n, b in branches.items()))
    if isinstance(parts, tuple):
        keys = getattr(parts, "_fields", None) or map(str, range(len(parts)))
        return set[str]().union(*(weights_in(b, f"{name}.{key}") for key, b in zip(keys, parts, strict=True)))
    return set()


def hold(module: nn.Module, name: str, t: Tensor, trainable: bool) -> None:
    """Register a tensor under its dotted name."""
    *owners, last = name.split(".")
    for owner in owners:
        if owner not in module._modules:
            module.add_module(owner, nn.Module())
        module = module.get_submodule(owner)
    if trainable:
        module.register_parameter(last, nn.Parameter(t))
    else:
        module.register_buffer(last, t)
