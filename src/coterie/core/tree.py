"""Nested NamedTuples and dictionaries of tensors: messages, states, weights.

Plural means a leading client axis: `stack` and `join` make it, `pick` and `put` read and write rows of it,
`mix` and `average` sum over it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

T = TypeVar("T")
Tree = dict[str, Tensor]

STATISTICS = (
    "running_mean",
    "running_var",
)  # BatchNorm's buffers, kept with the weights under torch's names


class Live(dict[str, Tensor]):
    """Weights in training mode: BatchNorm uses batch statistics and updates its running statistics in place."""


def is_statistic(name: str) -> bool:
    return name.rpartition(".")[2] in STATISTICS


def live(weights: Tree) -> Live:
    """Weights in training mode that are not trained; BatchNorm updates a copy of its statistics."""
    return Live({name: t.clone() if is_statistic(name) else t for name, t in weights.items()})


def apply(f: Callable[..., Tensor], tree: T, *others: T) -> T:
    """f on corresponding tensors of the trees."""
    node: Any = tree
    if isinstance(node, Tensor):
        return cast(T, f(node, *others))
    if isinstance(node, dict):
        rest = [cast("dict[str, Any]", o) for o in others]
        return cast(T, {k: apply(f, v, *(o[k] for o in rest)) for k, v in node.items()})
    if isinstance(node, tuple):
        parts = [apply(f, *branch) for branch in zip(node, *cast("list[tuple[Any]]", others), strict=True)]
        return cast(T, type(node)(*parts) if hasattr(node, "_fields") else tuple(parts))
    raise TypeError(f"a tree holds tensors, dictionaries and named tuples, not {type(node).__name__}")


def items(tree: object, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor with its dotted name."""
    if isinstance(tree, Tensor):
        yield prefix, tree
    elif isinstance(tree, dict):
        for name, branch in tree.items():
            yield from items(branch, f"{prefix}.{name}" if prefix else name)
    elif isinstance(tree, tuple):
        names = getattr(tree, "_fields", None) or [str(i) for i in range(len(tree))]
        yield from items(dict(zip(names, tree, strict=True)), prefix)
    else:
        raise TypeError(f"a tree holds tensors, dictionaries and named tuples, not {type(tree).__name__}")


def flatten(tree: object) -> Tree:
    return dict(items(tree))


def trained(tree: object) -> Tree:
    """Trained tensors by dotted name: all but BatchNorm's statistics."""
    return {name: tensor for name, tensor in items(tree) if not is_statistic(name)}


def fill(tree: T, tensors: Tree, prefix: str = "", leaf: type[dict[str, Any]] | None = dict) -> T:
    """The tree with its tensors replaced by those of the same dotted name.

    leaf: type of its dictionaries; None: as it is.
    """
    node: Any = tree
    if isinstance(node, Tensor):
        return cast(T, tensors[prefix])

    def below(name: str, branch: Any) -> Any:
        return fill(branch, tensors, f"{prefix}.{name}" if prefix else name, leaf)

    if isinstance(node, dict):
        return cast(T, (leaf or type(node))({k: below(k, v) for k, v in node.items()}))
    if hasattr(node, "_fields"):
        return cast(T, type(node)(*(below(k, v) for k, v in zip(node._fields, node, strict=True))))
    return cast(T, tuple(below(str(i), v) for i, v in enumerate(node)))


def leaves(tree: object) -> list[Tensor]:
    return [tensor for _, tensor in items(tree)]


def stack(trees: Sequence[T]) -> T:
    """Stack trees along a new leading axis."""
    return apply(lambda *rows: torch.stack(rows), *trees)


def join(parts: Sequence[T]) -> T:
    """Concatenate the rows of all parts. Tensors with one entry per sample are padded with zeros to equal length."""

    def rows(*tensors: Tensor) -> Tensor:
        if tensors[0].ndim < 2:
            return torch.cat(tensors)
        longest = max(t.shape[1] for t in tensors)
        return torch.cat([longer(t, longest) for t in tensors])

    return parts[0] if len(parts) == 1 else apply(rows, *parts)


def longer(t: Tensor, length: int) -> Tensor:
    """(S, n, ...) as (S, length, ...), zeros at the end."""
    return t if t.shape[1] == length else F.pad(t, (*[0, 0] * (t.ndim - 2), 0, length - t.shape[1]))


def alike(t: Tensor) -> bool:
    """Whether all rows share one memory (an expanded tensor)."""
    return t.ndim > 0 and len(t) > 1 and t.stride(0) == 0


def pick(trees: T, rows: Tensor | int) -> T:
    def read(t: Tensor) -> Tensor:
        if isinstance(rows, Tensor) and rows.dtype != torch.bool and rows.ndim == 1 and alike(t):
            return t[0].expand(len(rows), *t.shape[1:])
        if isinstance(rows, Tensor) and rows.ndim == 0:
            return t[rows[None]][0]  # t[rows] would wait for the device
        return t[rows]

    return apply(read, trees)


def put(trees: T, rows: Tensor | int, values: T) -> T:
    """A copy of the trees with these rows replaced."""

    def write(t: Tensor, v: Tensor) -> Tensor:
        out = t.clone()
        out[rows] = v
        return out

    return apply(write, trees, values)


def mix(trees: T, weights: Tensor) -> T:
    """Sum over the leading axis with weights (S,), or one sum for each row of weights (R, S)."""
    return apply(lambda t: torch.tensordot(weights.to(t.dtype), t, dims=1), trees)


def average(trees: T, samples: Tensor) -> T:
    """Mean over the leading axis, weighted by samples (S,)."""
    return mix(trees, samples.double() / samples.double().sum())


def blend(a: T, b: T, share: Tensor | float) -> T:
    """share * a + (1 - share) * b, with BatchNorm's statistics of a."""
    there = flatten(b)
    mixed = {n: t if is_statistic(n) else share * t + (1 - share) * there[n] for n, t in items(a)}
    return fill(a, mixed, leaf=None)


def copy(into: object, values: object) -> None:
    """Write the values of one tree into the tensors of another, in as few kernels as their types allow."""
    groups: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for old, new in zip(leaves(into), leaves(values), strict=True):
        olds, news = groups.setdefault(old.dtype, ([], []))
        olds.append(old)
        news.append(new)
    for olds, news in groups.values():
        torch._foreach_copy_(olds, news)


def copied(trees: T) -> T:
    """A copy of every tensor."""
    made = apply(torch.empty_like, trees)
    copy(made, trees)
    return made


def where(condition: Tensor, yes: T, no: T) -> T:
    return apply(lambda a, b: torch.where(condition, a, b), yes, no)


def overlay(base: T, top: object) -> T:
    """The named tuple `base` with the fields that `top` also has taken from `top`."""
    shared = set(cast(Any, base)._fields) & set(cast(Any, top)._fields)
    return cast(T, cast(Any, base)._replace(**{name: getattr(top, name) for name in shared}))


def finite(trees: object, rows: int) -> Tensor:
    """(rows,) whether every number in the row of a tree with a leading axis is finite."""
    fine = [t.isfinite() for t in leaves(trees) if t.is_floating_point()]
    if not fine:
        return torch.ones(rows, dtype=torch.bool)
    return torch.stack([t.flatten(1).all(1) if t.ndim > 1 else t for t in fine]).all(0)


def fetched(trees: T) -> T:
    """Copy to the CPU, with one synchronization for all tensors of a GPU."""
    copies = apply(lambda t: t.to("cpu", non_blocking=t.is_cuda), trees)  # into page-locked memory
    for gpu in {t.device for t in leaves(trees) if t.is_cuda}:
        torch.cuda.current_stream(gpu).synchronize()
    return apply(lambda t, copy: copy.clone() if t.is_cuda else copy, trees, copies)  # release page-locked memory


def size(tree: object) -> int:
    """Bytes of all tensors."""
    return sum(t.numel() * t.element_size() for t in leaves(tree))


def not_finite(tensors: Tree) -> list[str]:
    """Names of the tensors that hold a number that is not finite."""
    return [name for name, t in tensors.items() if t.is_floating_point() and not bool(t.isfinite().all())]
