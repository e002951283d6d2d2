"""Sequences of different lengths, filled at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from coterie.core.errors import CoterieError, unknown

Padding = float | Mapping[str, float]  # of several inputs by name


def check_unused(pairs: Sequence[tuple[Any, Any]], padding: float, per_token: bool) -> None:
    """Refuse texts with the padding id among their tokens. Texts of one length may be padded at the end already."""
    if padding != int(padding):
        raise CoterieError(f"`padding` of token ids is one of them, got {padding}")
    if per_token:
        if any(((tokens(x) == padding) & (np.asarray(y) >= 0)).any() for x, y in pairs):
            raise CoterieError(
                f"some sequences have the padding id {padding} among their tokens, with a label: mark tokens that have "
                "no label by -1, or pass sequences without padding"
            )
        return
    same = len({len(x) for x, _ in pairs}) == 1
    for x, _ in pairs:
        at = np.flatnonzero(tokens(x) == padding)
        if len(at) and not (same and at[0] == len(x) - len(at)):
            raise CoterieError(
                f"a sequence of {len(x)} tokens has the padding id {padding} at position {at[0]}; choose an id that no "
                "text has, or pass sequences without padding"
            )


def check_ends(pairs: Sequence[tuple[Any, Any]], padding: float) -> None:
    """Refuse series (T, ...) of different lengths or forms that end in padding or cannot be filled along time."""
    shapes = [np.shape(x) for x, _ in pairs]
    if other := next((shape for shape in shapes if shape[1:] != shapes[0][1:]), None):
        raise CoterieError(
            "`padding` fills series (T, F) along time, their first axis, but these differ in others, such as "
            f"{shapes[0]} and {other}; turn series (C, T) around: x.T"
        )
    for x, _ in pairs if len(set(shapes)) > 1 else ():
        if len(x) and (np.asarray(x)[-1] == padding).all():
            raise CoterieError(
                f"a series of {len(x)} steps ends with the padding {padding}; choose a number with which none ends"
            )


def sequence_length(sample: Any, padding: Padding) -> int:
    """Of the longest sequence of a sample that is padded."""
    return max(len(sample[name]) for name in padding) if isinstance(padding, Mapping) else len(sample)


def padding_of_inputs(pairs: Sequence[tuple[Any, Any]], padding: Mapping[str, float]) -> Callable[[Any], Any]:
    """Pads the named inputs of a sample along their first axis, each to its longest of all samples."""
    longest: dict[str, int] = {}
    for name in padding:
        for sample, _ in pairs:
            if name not in sample:
                raise unknown("input to be padded", name, map(str, sample))
            if not np.ndim(sample[name]):
                raise CoterieError(f"`padding` is for sequences; input '{name}' has one value per sample")
        longest[name] = max((len(sample[name]) for sample, _ in pairs), default=0)

    def fill(sample: Any) -> dict[str, Any]:
        return {name: extended(v, longest[name], padding[name]) if name in padding else v for name, v in sample.items()}

    return fill


def extended(sequence: Any, length: int, value: float) -> np.ndarray[Any, Any]:
    """(T, ...) -> (length, ...), in the type of the sequence."""
    values = np.asarray(sequence)
    rest = np.full((length - len(values), *values.shape[1:]), value).astype(values.dtype)
    if (rest != value).any():
        raise CoterieError(f"`padding` {value} does not fit into a sequence of {values.dtype}")
    return np.concatenate([values, rest])


def tokens(sample: Any) -> np.ndarray[Any, Any]:
    made = np.asarray(sample)
    if not is_tokens(made):
        raise CoterieError(f"`padding`: some samples are sequences of token ids, one is {made.dtype} {made.shape}")
    return made


def is_tokens(sample: np.ndarray[Any, Any]) -> bool:
    return sample.ndim == 1 and sample.dtype.kind in "iu"


def steps(sample: Any) -> np.ndarray[Any, Any]:
    made = np.asarray(sample)
    if not made.ndim or made.dtype.kind not in "iufb":
        raise CoterieError(
            f"`padding` is for sequences of token ids or numbers, got {made.dtype} of shape {made.shape}"
        )
    return made


def filled_up(values: np.ndarray[Any, Any], length: int, padding: int) -> np.ndarray[Any, Any]:
    return np.concatenate([values, np.full(length - len(values), padding)]).astype(np.int64)
