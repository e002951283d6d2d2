"""Labels of users' data: read as they are, then converted for the task that the user names or the labels suggest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from coterie.core.errors import CoterieError
from coterie.core.task import Classification, Task
from coterie.core.tasks import MultiLabel, NextToken, Regression, Segmentation
from coterie.data.user.frames import LOST
from coterie.data.user.reading import MISSING, NO_LABEL, OUT_OF_RANGE, Array, Notes, Part, as_names, in_order
from coterie.data.user.text_labels import check_text_labels, no_number, without_missing

if TYPE_CHECKING:
    from coterie.data.user.pooled import Places

MOST_CLASSES = 10_000
FEW_CLASSES, USED = 20, 0.9  # numbers that are taken for classes without asking; share of 0..max that must occur
A_CLASS = "a class is a whole number from 0 or a name; --task regression takes numbers"
NO_TARGET = "target that is missing or infinite"
TOO_LONG = (
    "float32 cannot tell these targets apart; subtract a constant (timestamps: hours since a start) or scale them"
)
VOID = 255  # of pixels without a class, in many formats of masks
IS_VOID = f"pixels of {VOID}, and none of {VOID - 1}: mark ignored pixels with -1, and number classes from 0"
Whole = NDArray[np.int64]


def as_labels(values: Array, place: Callable[[int], str]) -> Array:
    """(n, ...) labels as int64, float64 or text; text may be missing ("")."""
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.dtype.kind in "iub":
        return (np.minimum(values, np.uint64(2**62)) if values.dtype == np.uint64 else values).astype(np.int64)
    if values.dtype.kind == "f":
        return values.astype(np.float64)
    if values.dtype.kind == "O" and values.ndim == 1:
        return object_labels(values, place)
    if values.dtype.kind in "US" and values.ndim == 1:
        return as_names(values, place)
    raise CoterieError(f"{place(0)}: labels of type {values.dtype}, shape {values.shape}; {A_CLASS}")


def object_labels(values: Array, place: Callable[[int], str]) -> Array:
    """Labels as text; None and NaN mean no label."""
    names = []
    text = next((i for i, value in enumerate(values) if isinstance(value, str)), None)
    if text is not None and any(isinstance(value, float) and not np.isnan(value) for value in values):
        raise CoterieError(f"{place(text)}: the label '{values[text]}' is text among numbers; correct or drop it")
    for i, value in enumerate(values):
        if value is None or (isinstance(value, float) and np.isnan(value)):
            names.append("")
        elif isinstance(value, (str, int, np.integer)):
            names.append(str(value))
        else:
            raise CoterieError(f"{place(i)}: a label of type {type(value).__name__}; {A_CLASS}")
    return np.array(names, dtype=str)


def guessed(parts: Sequence[Part], classes: tuple[str, ...] | None) -> type[Task]:
    """The task that labels suggest: by their shape, by fractions, and by samples that are tokens.

    classes: names of the classes, if they are known.
    """
    shape, where = parts[0].y.shape[1:], parts[0].place(0)
    for part in parts:
        if part.y.shape[1:] != shape:
            raise CoterieError(f"{part.place(0)}: labels of shape {part.y.shape[1:]}, others have {shape}")
    whole = all(part.y.dtype.kind in "iU" for part in parts)
    if not shape and not classes and any(part.y.dtype.kind == "U" for part in parts):
        check_text_labels(parts)
    if not shape and any(map(has_fractions, parts)):
        return Regression
    if not shape:
        if not classes and all(part.y.dtype.kind != "U" for part in parts):
            check_classes_or_amounts(parts)
        return Classification
    if whole and any(kind.base.kind == "i" and own == shape for kind, own in inputs(parts[0].x)):
        return NextToken
    if len(shape) == 1:
        check_one_hot(parts)
        check_unknown_labels(parts)
        return MultiLabel if all(np.isin(part.y, (0, 1)).all() for part in parts) else Regression
    if len(shape) == 2 and whole:
        return Segmentation
    masks = "; masks are (H, W), without an axis of one channel" if len(shape) == 3 and shape[0] == 1 else ""
    raise CoterieError(
        f"{where}: labels of shape {shape} fit no task{masks}; name yours with --task package.module:Class"
    )


def inputs(x: Array) -> list[tuple[np.dtype[Any], tuple[int, ...]]]:
    """Type and shape of each input of samples (n, ...)."""
    if x.dtype.names is None:
        return [(x.dtype, x.shape[1:])]
    return [(kind := x.dtype[name], kind.shape) for name in x.dtype.names]


def check_classes_or_amounts(parts: Sequence[Part]) -> None:
    """Refuse to guess from many whole numbers with gaps, such as ages: as classes, most would have no samples."""
    values = np.unique(np.concatenate([part.y[np.isfinite(part.y) & (part.y >= 0)] for part in parts]))
    if len(values) > FEW_CLASSES and len(values) < USED * (values[-1] + 1):
        raise CoterieError(
            f"{parts[0].place(0)}: labels are {len(values)} different whole numbers from {values[0]:g} to "
            f"{values[-1]:g}; are they amounts or classes? Name the task: --task regression or --task classification"
        )


def check_one_hot(parts: Sequence[Part]) -> None:
    """Refuse to guess from columns of which exactly one is 1: several labels per sample, or one class."""
    if all(np.isin(part.y, (0, 1)).all() and (part.y.sum(1) == 1).all() for part in parts):
        raise CoterieError(
            f"{parts[0].place(0)}: each sample has a 1 in exactly one of {parts[0].y.shape[1]} label columns; if these "
            "are classes, give one number or name per sample; if they are labels, --task multi-label"
        )


def check_unknown_labels(parts: Sequence[Part]) -> None:
    """Refuse to guess from columns of -1, 0 and 1: several labels, some of them unknown, or numbers."""
    if all(np.isin(part.y, (-1, 0, 1)).all() for part in parts) and any((part.y == -1).any() for part in parts):
        raise CoterieError(
            f"{parts[0].place(0)}: the label columns hold -1, 0 and 1; name the task: --task regression if these are "
            "amounts; --task multi-label takes 0 and 1, without unknown labels"
        )


def has_fractions(part: Part) -> bool:
    return part.y.dtype.kind == "f" and bool((part.y[np.isfinite(part.y)] % 1 != 0).any())


def converted(
    parts: Sequence[Part], kind: type[Task], known: tuple[str, ...] | None, place: Places, notes: Notes
) -> tuple[Array, tuple[str, ...]]:
    """(N, ...) labels in the type of the task, -1 for invalid classes; and the names of classes."""
    if kind.one_class:
        return numbered(joined_names([as_classes(part, known or (), notes) for part in parts]), known, place, notes)
    if text := next((part for part in parts if part.y.dtype.kind == "U"), None):
        row = no_number(text)
        raise CoterieError(f"{text.place(row)}: the label '{text.y[row]}' is text; {kind.name} needs numbers")
    y = np.concatenate([part.y for part in parts])
    gone = ~np.isfinite(y).reshape(len(y), -1).all(1)
    notes.wrong_at(NO_TARGET, np.flatnonzero(gone), place)
    if kind.label_type.is_floating_point:
        y = y[:, None] if y.ndim == 1 else y
        check_digits(y, known or (), place, notes)
        with np.errstate(over="ignore"):  # which is reported
            return y.astype(np.float32), known or ()
    odd = ~gone & (y % 1 != 0).reshape(len(y), -1).any(1)
    notes.wrong_at(f"label that is not a whole number; {kind.name} needs classes", np.flatnonzero(odd), place)
    if kind is Segmentation and not known and (y == VOID).any() and not (y == VOID - 1).any():
        notes.wrong_at(IS_VOID, np.flatnonzero((y == VOID).reshape(len(y), -1).any(1)), place)
    return np.where(np.isfinite(y), y, -1).astype(np.int64), known or ()


def check_digits(y: Array, names: Sequence[str], place: Places, notes: Notes) -> None:
    """Report targets (N, ...) whose differences float32 does not hold, such as timestamps."""
    flat = y.reshape(len(y), -1).astype(np.float64)
    fine = np.abs(flat) < np.finfo(np.float32).max
    with np.errstate(over="ignore", invalid="ignore"):
        lost = np.where(fine, np.abs(flat.astype(np.float32) - flat), 0).max(0)
        values = np.where(fine, flat, np.nan)
        spread = np.nanstd(values, 0) if fine.any(0).all() else np.zeros(flat.shape[1])
        varies = spread > 1e-12 * np.where(fine, np.abs(flat), 0).max(0)  # by more than float64 rounds
    for at in np.flatnonzero((lost > LOST * spread) & varies).tolist():
        what = f"'{names[at]}'" if at < len(names) else "the target"
        notes.wrong(TOO_LONG, f"{what}: {np.nanmin(values[:, at]):.9g} to {np.nanmax(values[:, at]):.9g}")
    notes.wrong_at("target beyond the range of float32", np.flatnonzero((np.isfinite(flat) & ~fine).any(1)), place)


def as_classes(part: Part, known: Sequence[str], notes: Notes) -> Array:
    """(n,) int64 or names; numbers must be whole, NaN and spellings of a missing value mean no label."""
    values, place = part.y, part.place
    seen = f"labels of type {values.dtype}, shape {values.shape}"
    if values.ndim != 1:
        raise CoterieError(f"{place(0)}: {seen}: classification needs one class per sample; choose another --task")
    if values.dtype.kind != "f":
        return without_missing(values, known) if values.dtype.kind == "U" else values
    gone = np.isnan(values)
    fine = gone | ((np.abs(values) < 2**53) & (values == np.trunc(values)))
    wrong = np.flatnonzero(~fine)
    notes.wrong_at(f"target that is not a class; {A_CLASS}", wrong, lambda i: f"{place(i)}: {values[i]:g} ({seen})")
    return np.where(gone | ~fine, 0, values).astype(np.int64) + np.where(gone, MISSING, np.where(fine, 0, -1))


def joined_names(labels: Sequence[Array]) -> Array:
    """(N,) integers if all clients have integers, else names."""
    if any(y.dtype.kind == "U" for y in labels):
        labels = [y if y.dtype.kind == "U" else np.where(y == MISSING, "", y.astype(str)) for y in labels]
    return np.concatenate(labels)


def numbered(y: Array, known: tuple[str, ...] | None, place: Places, notes: Notes) -> tuple[Whole, tuple[str, ...]]:
    """(N,) class indices, -1 for invalid labels; and the class names."""
    if y.dtype.kind == "U":
        values, at = np.unique(y, return_inverse=True)
        names = known or tuple(sorted((str(v) for v in values if v), key=in_order))
        number = {name: i for i, name in enumerate(names)}
        labels = np.array([number.get(str(v), -1) for v in values], np.int64)[at.reshape(-1)]
        gone = y == ""
    else:
        gone = y == MISSING
        fine = (y >= 0) & (y < (len(known) if known else MOST_CLASSES))
        labels = np.where(fine, y, -1)
        names = known or tuple(map(str, range(int(labels.max()) + 1)))
    most = len(known) if known else MOST_CLASSES
    notes.wrong_at(NO_LABEL, np.flatnonzero(gone), place)
    wrong = np.flatnonzero((labels < 0) & ~gone)
    rule = f"one of the classes 0 to {most - 1}" if known else "a class: whole numbers from 0, or names"
    notes.wrong_at(OUT_OF_RANGE, wrong, lambda i: f"{place(i)}: {y[i]} is not {rule}")
    return labels, names
