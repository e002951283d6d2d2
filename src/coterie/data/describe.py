"""Describe samples and their preprocessing: for `data check`, the first lines of a run and config.json."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from coterie.core.data import Column, FederatedData, Transform, is_pixels
from coterie.core.errors import some_of

SHOWN = 12  # names per line
FEW = 3  # channels whose statistics are shown


def describe_input(data: FederatedData) -> list[str]:
    """Lines that describe a sample and its preprocessing."""
    settings = data.partition.settings if data.partition is not None else {}
    return [*input_lines(data.shape, data.train.x.dtype, data.transform), *map(str, settings.get("reading", []))]


def input_lines(shape: tuple[int, ...], dtype: torch.dtype, transform: Transform) -> list[str]:
    if transform.inputs:
        parts = [(one, Transform(one.mean, one.std, axis=one.axis)) for one in transform.inputs]
        own = [f"input '{one.name}': {line}" for one, by in parts for line in input_lines(one.shape, one.type, by)]
        return [f"samples: {len(parts)} inputs by name", *(line.replace("samples: ", "") for line in own)]
    size, kind = " x ".join(map(str, shape)) or "1", str(dtype).removeprefix("torch.")
    if transform.columns:
        lines = table_lines(transform.columns, kind)
    elif is_pixels(shape, dtype):
        lines = [f"samples: images of {size} bytes, scaled from 0..255 to 0..1"]
    elif dtype == torch.bool:
        lines = [f"samples: {size} booleans"]
    elif dtype.is_floating_point:
        lines = [f"samples: {size} numbers ({kind}), used as is"]
    else:
        lines = [f"samples: {size} integers ({kind}), passed to the network as integers (tokens), not scaled"]
    if transform.mean:
        channels = (
            "inputs" if transform.columns else "columns" if len(shape) <= 1 else f"channels of axis {transform.axis}"
        )
        few = len(transform.mean) <= FEW
        by = (
            f"mean {numbers(transform.mean)}, standard deviation {numbers(transform.std)}"
            if few
            else "each by its own mean and standard deviation"
        )
        lines.append(f"standardized: {len(transform.mean)} {channels}, {by}")
    return lines


def numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def table_lines(columns: Sequence[Column], kind: str) -> list[str]:
    lines = [f"samples: {len(columns)} columns ({kind}): {some_of([column.name for column in columns], SHOWN)}"]
    texts = [column for column in columns if column.categories]
    if texts:
        listed = [f"{column.name} ({some_of(column.categories, 6)})" for column in texts]
        lines.append(f"one input per category: {some_of(listed, 6)}")
    filled = [column for column in columns if column.fill is not None]
    if filled:
        fills = some_of([f"{column.name} {fill(column)}" for column in filled], SHOWN)
        lines.append(f"missing values are filled with: {fills}")
    marked = [column.name for column in columns if column.indicator]
    if marked:
        lines.append(f"one more input marks missing values: {some_of(marked, SHOWN)}")
    inputs = sum(len(column.inputs) for column in columns)
    if inputs != len(columns):
        lines.append(f"inputs of the network: {inputs}")
    return lines


def fill(column: Column) -> str:
    assert column.fill is not None
    return column.categories[int(column.fill)] if column.categories else f"{column.fill:g}"
