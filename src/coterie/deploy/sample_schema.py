"""The samples of all devices must have the same schema: find the first difference, and pool their statistics."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from coterie.core.data import Column, Transform
from coterie.deploy.handshake import SampleSchema
from coterie.deploy.task_schema import TaskSchema, task_difference


def difference(one: str, a: SampleSchema, other: str, b: SampleSchema) -> str | None:
    """Describe the first incompatibility between the samples of two sides; None if they are compatible.

    Means, standard deviations and fill values may differ: they are pooled.
    """
    found = columns(one, a.transform.columns, other, b.transform.columns)
    if found:
        return found
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return (
            f"{one} has {a.dtype} samples of shape {a.shape}, {other} has {b.dtype} samples of shape {b.shape}; type "
            "and shape must be the same on all devices"
        )
    if found := task_difference(one, a.task, other, b.task) if a.task.kind != b.task.kind else None:
        return found
    if (a.classes, a.class_names) != (b.classes, b.class_names):
        return classes(one, a, other, b)
    return task_difference(one, a.task, other, b.task) or transforms(one, a.transform, other, b.transform)


def columns(one: str, ours: tuple[Column, ...], other: str, theirs: tuple[Column, ...]) -> str | None:
    if bool(ours) != bool(theirs):
        tables, arrays = (one, other) if ours else (other, one)
        return f"{tables} has a table with named columns, {arrays} has arrays without names"
    for place, (a, b) in enumerate(itertools.zip_longest(ours, theirs), 1):
        if a is None or b is None or a.name != b.name:
            return named(one, ours, other, theirs, place)
        if a.categories != b.categories:
            return (
                f"in column '{a.name}' {one} has the categories {listed(a.categories)}, {other} has "
                f"{listed(b.categories)}; all devices must use the same ones"
            )
        if a.indicator != b.indicator:
            gaps, full = (one, other) if a.indicator else (other, one)
            return (
                f"in column '{a.name}' {gaps} marks missing values with one more input, {full} does not; read the "
                "data with the same --missing, and fill or drop the column where only some devices have gaps"
            )
    return None


def named(one: str, ours: tuple[Column, ...], other: str, theirs: tuple[Column, ...], place: int) -> str:
    """Describe the first differing column; positions start at 1."""

    def at(side: tuple[Column, ...]) -> str:
        return f"column '{side[place - 1].name}'" if place <= len(side) else "no column"

    found = f"{one} has {at(ours)} at position {place}, {other} has {at(theirs)}"
    lacks = {column.name for column in theirs} - {column.name for column in ours}
    more = {column.name for column in ours} - {column.name for column in theirs}
    if not lacks and not more:
        return f"{found}; the order of the columns differs: reorder them on one side"
    parts = [f"{word} {listed(sorted(names))}" for word, names in (("lacks", lacks), ("also has", more)) if names]
    return f"{found}; {one} {' and '.join(parts)}: all devices must have the same columns in the same order"


def classes(one: str, a: SampleSchema, other: str, b: SampleSchema) -> str:
    for number, (x, y) in enumerate(itertools.zip_longest(a.class_names, b.class_names)):
        if x != y:
            ours, theirs = ("none" if name is None else f"'{name}'" for name in (x, y))
            return f"class {number} is {ours} on {one} and {theirs} on {other}; all devices must have the same classes"
    return f"{one} has {a.classes} classes, {other} has {b.classes}; all devices must have the same classes"


def transforms(one: str, a: Transform, other: str, b: Transform) -> str | None:
    checks: tuple[tuple[str, str, Callable[[Transform], object]], ...] = (
        ("normalises {} values of a sample", "use the same --normalise", lambda t: len(t.mean)),
        ("has channels along axis {}", "use the same --channel-axis", lambda t: t.axis),
        ("pads sequences with {}", "use the same padding", lambda t: t.padding),
        ("crops with a padding of {}", "use the same --dataset and --protocol", lambda t: t.crop),
        ("has random flips set to {}", "use the same --dataset and --protocol", lambda t: t.flip),
    )
    for words, remedy, of in checks:
        if of(a) != of(b):
            return f"{one} {words.format(of(a))}, {other} {words.format(of(b))}; {remedy} on all devices"
    return None


def listed(names: tuple[str, ...] | list[str], most: int = 8) -> str:
    return ", ".join(f"'{name}'" for name in names[:most]) + (", ..." if len(names) > most else "") or "none"


def pooled(transforms: list[Transform], samples: list[int], robust: bool = False) -> Transform:
    """Mean, standard deviation and fill values over the samples of all devices, from those of each device.

    robust: unweighted medians over devices, so that a single false report has little influence.
    """
    weight = torch.tensor(samples, dtype=torch.float64) / sum(samples)
    mean, std = moments(transforms, weight, robust)
    return replace(
        transforms[0],
        mean=mean,
        std=std,
        columns=tuple(fill(same, weight, robust) for same in zip(*(t.columns for t in transforms), strict=True)),
    )


def pooled_task(tasks: list[TaskSchema], samples: list[int], robust: bool = False) -> TaskSchema:
    """The task of all devices, with mean and standard deviation over all their training labels."""
    if all(task == tasks[0] for task in tasks):
        return tasks[0]
    weight = torch.tensor(samples, dtype=torch.float64) / sum(samples)
    mean, std = moments(tasks, weight, robust)
    return replace(tasks[0], mean=mean, std=std)


def moments(
    found: Sequence[Transform | TaskSchema], weight: Tensor, robust: bool
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation over all samples, from those of each device."""

    def middle(values: Tensor) -> Tensor:
        """(devices, n) -> (n,)"""
        return values.quantile(0.5, 0) if robust else (weight[:, None] * values).sum(0)

    mean, std = (torch.tensor([getattr(one, name) for one in found], dtype=torch.float64) for name in ("mean", "std"))
    center = middle(mean)
    spread = middle(std.square() + (mean - center).square()).sqrt()
    return tuple(center.tolist()), tuple(spread.tolist())


def fill(same: tuple[Column, ...], weight: Tensor, robust: bool) -> Column:
    """Pool the fill value of a column. For categories, the most common one by samples; robust: by devices."""
    found = [(column.fill, float(w)) for column, w in zip(same, weight, strict=True) if column.fill is not None]
    if not found:
        return same[0]
    values, weights = (torch.tensor(part, dtype=torch.float64) for part in zip(*found, strict=True))
    if same[0].categories:
        totals = {value: sum(1.0 if robust else w for v, w in found if v == value) for value, _ in found}
        return replace(same[0], fill=max(sorted(totals), key=totals.__getitem__))
    pooled_fill = values.quantile(0.5) if robust else (weights * values).sum() / weights.sum()
    return replace(same[0], fill=float(pooled_fill))
