"""Samples with several inputs, by name. In arrays of such samples, every entry has one field per input."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.core.data import FederatedData
from coterie.core.errors import CoterieError, unknown
from coterie.core.packing import Input
from coterie.data.user.inputs import as_input, once
from coterie.data.user.reading import INPUTS, Array, Notes, Part


def has_fields(x: Array) -> bool:
    return x.dtype.names is not None


def joined_inputs(given: Mapping[Any, Array], where: str) -> Array:
    """(n,) samples with one field per input, from arrays (n, ...)."""
    if not given:
        raise CoterieError(f"{where}: a dictionary without inputs")
    for name, values in given.items():
        if not isinstance(name, str) or not name:
            raise CoterieError(f"{where}: inputs need text as names, got {name!r:.40}")
        if values.dtype.kind not in "buif":
            raise CoterieError(f"{where}, input '{name}': values of type {values.dtype}; they must be numbers")
    check_lengths(given, f"{where}: inputs")
    made = np.empty(
        len(next(iter(given.values()))), [(name, values.dtype, values.shape[1:]) for name, values in given.items()]
    )
    for name, values in given.items():
        made[name] = values
    return made


def check_lengths(given: Mapping[Any, Any], what: str) -> None:
    """Refuse arrays and lists that do not have one entry for each sample."""
    try:
        counts = {name: len(values) for name, values in given.items()}
    except TypeError:  # a number, or an array without an axis
        raise CoterieError(f"{what} must be arrays or lists with one entry for each sample") from None
    if len(set(counts.values())) > 1:
        found = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise CoterieError(f"{what} have different lengths: {found}")


def stacked_inputs(samples: Sequence[Any], read: Callable[[Any, str], Array], where: str) -> Array:
    """(n,) from samples that are dictionaries. read: converts one value."""
    names = list(samples[0])
    columns: dict[Any, list[Array]] = {name: [] for name in names}
    for i, sample in enumerate(samples):
        if not isinstance(sample, Mapping) or set(sample) != set(names):
            found = ", ".join(map(str, sample)) if isinstance(sample, Mapping) else type(sample).__name__
            raise CoterieError(
                f"{where}, sample {i}: inputs {found}; the first sample has {', '.join(map(str, names))}"
            )
        for name, column in columns.items():
            column.append(read(sample[name], f"{where}, sample {i}, input '{name}'"))
            if column[-1].shape != column[0].shape:
                raise CoterieError(
                    f"{where}, sample {i}, input '{name}': shape {column[-1].shape} differs from the first sample's "
                    f"{column[0].shape}; padding={{'{name}': ID}} fills sequences of different lengths"
                )
    return joined_inputs({name: np.stack(column) for name, column in columns.items()}, where)


def typed(part: Part, kinds: Mapping[str, str], notes: Notes) -> Part:
    """Convert every input to a type that networks take, as `as_input` does; booleans stay. kinds: of INPUTS."""
    if part.x.dtype.names is None:
        return part
    for name, kind in kinds.items():
        if name not in part.x.dtype.names:
            raise unknown("input", name, part.x.dtype.names)
        if kind not in INPUTS:
            raise unknown(f"type of input '{name}'", kind, INPUTS)
    made = {name: typed_input(part, name, kinds.get(name, "auto"), notes) for name in part.x.dtype.names}
    return part._replace(x=joined_inputs(made, part.place(0)))


def typed_input(part: Part, name: str, kind: str, notes: Notes) -> Array:
    x: Array = part.x[name]
    if x.dtype.kind == "b" and kind == "auto":
        return x
    own, found = part._replace(x=x, place=lambda i: f"{part.place(i)}, input '{name}'"), Notes()
    made = as_input(own, kind, found).x
    for line in found.done:
        once(notes, f"input '{name}': {line}")
    if made.dtype.kind == "f":
        wrong = np.flatnonzero(~np.isfinite(made.reshape(len(made), -1)).all(1))
        notes.wrong_at("missing or infinite value; fill it in or leave the sample out", wrong, own.place)
    return made[:, 0] if x.ndim == 1 else made


def alike(parts: list[Part], kind: str) -> list[Part]:
    """The parts with their inputs in one order; parts that do not have the same inputs are refused."""
    if kind != "auto":
        raise CoterieError(f"input {kind} is for samples that are one array; name the types of inputs: input={{...}}")
    first = parts[0]
    made = []
    for part in parts:
        if set(part.x.dtype.names or ()) != set(first.x.dtype.names or ()):
            ours, theirs = (", ".join(one.x.dtype.names or ()) or "none" for one in (part, first))
            raise CoterieError(f"{part.place(0)}: inputs {ours}; {first.place(0)} has {theirs}")
        made.append(part._replace(x=joined_inputs({n: part.x[n] for n in first.x.dtype.names or ()}, part.place(0))))
        for own, other in zip(inputs_of(made[-1].x), inputs_of(first.x), strict=True):
            if own != other:
                raise CoterieError(f"{part.place(0)}: input {own}; {first.place(0)} has {other}")
    return made


def inputs_of(x: Array) -> tuple[Input, ...]:
    """The inputs that samples (n,) consist of, in the order of their bytes."""
    found = ((name, x.dtype[name]) for name in x.dtype.names or ())
    return tuple(Input(name, tuple(kind.shape), kind.base.name) for name, kind in found)


def packed(x: Array) -> Tensor:
    """(n,) samples with fields -> (n, bytes)."""
    return torch.from_numpy(np.ascontiguousarray(x).view(np.uint8).reshape(len(x), -1))


def named_inputs(content: Mapping[str, Array], key: str) -> dict[str, Array]:
    """The inputs NAME among the arrays of a file, where they are key.NAME. key: such as x or train_x."""
    return {name.removeprefix(f"{key}."): values for name, values in content.items() if name.startswith(f"{key}.")}


def samples_in(content: Mapping[str, Array], key: str, where: str) -> Array | None:
    """The samples of a file: an array `key`, or one array key.NAME for each input; None if it has neither."""
    found = named_inputs(content, key)
    if found and key in content:
        raise CoterieError(f"{where}: has the array '{key}' and the inputs {', '.join(found)}; use one of them")
    return joined_inputs(found, where) if found else content.get(key)


def refuse_transform(data: FederatedData, transform: object) -> None:
    if data.transform.inputs and transform is not None:
        raise CoterieError(
            "`transform` is for samples that are one array, not for several inputs; use normalise='auto'"
        )
