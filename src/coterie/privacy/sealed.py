"""Encrypted weights inside messages: where they are, and how they are flattened and rebuilt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from coterie.core import tree
from coterie.core.ranges import Known, Range, Rule
from coterie.core.tree import Tree
from coterie.privacy import ckks
from coterie.privacy.linear import WeightField

WELCOME = "sealed"  # prefix of the names in an encrypted welcome


class Whole(Rule):
    """Accepts ciphertexts with correct checksums."""

    def holds(self, t: Tensor, known: Known) -> Tensor:
        return torch.tensor([all(map(ckks.whole, row.flatten(0, -2).cpu())) for row in t], device=t.device)

    def fault(self, t: Tensor, known: Known) -> str:
        return "has a damaged ciphertext"


class Sealed(NamedTuple):
    """Encrypted weights of one model, or of R models with a leading axis R."""

    outline: Any  # the tree of weights with tensors (0, ...): names, shapes and types
    ciphertexts: Annotated[Tensor, Whole()]  # (c, bytes) uint8
    # () multiplier of the decrypted numbers; from a client it is 1, or NaN if its weights were not finite
    factor: Annotated[Tensor, Range(1, 1)]
    key: Tensor  # () fingerprint of the keys

    @property
    def axes(self) -> tuple[int, ...]:
        return tuple(self.factor.shape)


class SealedModel(NamedTuple):
    """One encrypted model of a message."""

    field: Sealed
    row: int | None  # None: the field has no rows
    whose: str

    @property
    def sealed(self) -> Sealed:
        return self.field if self.row is None else tree.pick(self.field, self.row)

    @property
    def term(self) -> ckks.Term:
        sealed = self.sealed
        return ckks.Term(sealed.ciphertexts, float(sealed.factor), self.whose)


def with_leaves(message: Any, names: Iterable[str]) -> list[tuple[str, Any]]:
    """These fields, without empty trees: an encoder may have no weights."""
    return [(name, value) for name in names if tree.leaves(value := getattr(message, name))]


def sealed_fields(message: Any) -> list[tuple[str, Sealed]]:
    return [(name, value) for name, value in zip(message._fields, message, strict=True) if isinstance(value, Sealed)]


def places(message: Any) -> dict[str, WeightField]:
    return {name: WeightField(sealed.outline, sealed.axes) for name, sealed in sealed_fields(message)}


def rows(message: Any, whose: Sequence[str] = ()) -> list[SealedModel]:
    """All encrypted models of a message, in the order of the columns."""
    found: list[SealedModel] = []
    for _, sealed in sealed_fields(message):
        numbers = range(len(sealed.factor)) if sealed.axes else [None]
        found += [
            SealedModel(sealed, row, whose[row] if whose and row is not None else "of the server") for row in numbers
        ]
    return found


def unchanged(lines: Tensor, models: Sequence[SealedModel]) -> Sealed | None:
    """The field whose rows equal these sums (R, C), which is sent without a copy; None if there is none."""
    whole = (lines.count_nonzero(1) == 1) & (lines.amax(1) == 1)
    chosen = [models[j] for j in lines.argmax(1).tolist()]
    field = chosen[0].field
    complete = [model.row for model in chosen] == (list(range(len(field.factor))) if field.axes else [None])
    kept = field.ciphertexts.shape[-1] == ckks.SUM
    return field if bool(whole.all()) and complete and kept and all(m.field is field for m in chosen) else None


def outline(weights: Any) -> Any:
    return tree.apply(lambda t: t.new_empty(0, *t.shape), weights)


def flat(weights: Any) -> Tensor:
    """(n,) all numbers."""
    return torch.cat([t.detach().cpu().double().flatten() for t in tree.leaves(weights)])


def sealed_welcome(welcome: Tree) -> Sealed:
    """Rebuild an encrypted welcome from its flattened form."""
    parts = {name.removeprefix(f"{WELCOME}."): t for name, t in welcome.items()}
    shapes = {name.removeprefix("outline."): t for name, t in parts.items() if name.startswith("outline.")}
    return Sealed(shapes, parts["ciphertexts"], parts["factor"], parts["key"])
