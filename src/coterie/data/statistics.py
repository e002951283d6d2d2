"""Statistics of the training samples of all clients: fill values, mean and standard deviation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.core.data import Column, FederatedData, Split, Transform, is_pixels
from coterie.core.errors import CoterieError, unknown
from coterie.core.packing import Input, unpack
from coterie.core.padding import real_steps
from coterie.core.preprocess import Preprocess

NORMALISE = ("auto", "none")
CHANNELS = (1, 3, 4)  # common numbers of image channels
BLOCK = 4096  # samples at a time, in float64


def normalised(
    data: FederatedData,
    transform: Transform,
    how: str | None,
    channel_axis: int | Mapping[str, int] | None = None,
) -> FederatedData:
    """Set the transform. how: auto computes mean and standard deviation over all clients, none removes them.

    channel_axis: of samples with several inputs, by name.
    """
    if how is not None and how not in NORMALISE:
        raise unknown("--normalise value", how, NORMALISE)
    if how != "auto":
        if channel_axis is not None:
            raise CoterieError("--channel-axis needs --normalise auto")
        return replace(data, transform=transform if how is None else replace(transform, mean=(), std=()))
    if transform.inputs:
        return replace(
            data, transform=replace(transform, inputs=standardised_inputs(data.train, transform, channel_axis))
        )
    if isinstance(channel_axis, Mapping):
        raise CoterieError("`channel_axis` by name is for samples with several inputs, which are dictionaries")
    axis = statistics_axis(data.shape, data.train.x.dtype, channel_axis)
    transform = replace(transform, mean=(), std=(), axis=axis)
    mean, std = moments(torch.split(data.train.x, BLOCK), transform)
    return replace(data, transform=replace(transform, mean=mean, std=std))


def standardised_inputs(
    train: Split, transform: Transform, channel_axis: int | Mapping[str, int] | None
) -> tuple[Input, ...]:
    """Mean and standard deviation of every input; integers that are not pixels, and booleans, are left alone."""
    axes = {} if channel_axis is None else channel_axis
    if not isinstance(axes, Mapping):
        raise CoterieError(
            f"name the input of this channel axis: channel_axis={{'{transform.inputs[0].name}': {axes}}}"
        )
    if odd := set(axes) - {one.name for one in transform.inputs}:
        raise unknown("input", min(odd), [one.name for one in transform.inputs])
    made = []
    for one in transform.inputs:
        if one.type.is_floating_point or is_pixels(one.shape, one.type):
            try:
                axis = statistics_axis(one.shape or (1,), one.type, axes.get(one.name))
            except CoterieError as error:
                raise CoterieError(
                    f"input '{one.name}': {error}; in Python, channel_axis={{'{one.name}': AXIS}}"
                ) from None
            blocks = (unpack(transform.inputs, x)[one.name] for x in torch.split(train.x, BLOCK))
            plain = Transform(axis=axis, padding=one.padding)
            mean, std = moments((x.view(len(x), *one.shape or (1,)) for x in blocks), plain)
            one = replace(one, mean=mean, std=std, axis=axis)
        made.append(one)
    return tuple(made)


def statistics_axis(shape: tuple[int, ...], dtype: torch.dtype, named: int | None) -> int:
    """The channel axis of one sample; raises an error if it is neither named nor clear from the shape."""
    size = " x ".join(map(str, shape))
    if not dtype.is_floating_point and not is_pixels(shape, dtype):
        raise CoterieError(
            f"tokens cannot be normalized (samples are integers of shape {size}); omit --normalise, or read them "
            "as numbers with --input values"
        )
    if named is not None:
        if not -len(shape) <= named < len(shape):
            raise CoterieError(f"--channel-axis must be from 0 to {len(shape) - 1} for samples of {size}, got {named}")
        return named % len(shape)
    if len(shape) == 1 or (len(shape) == 3 and (shape[0] in CHANNELS or shape[2] not in CHANNELS)):
        return 0
    if len(shape) == 2:
        raise CoterieError(
            f"--normalise auto needs --channel-axis for samples of {size}: 0 reads them as {shape[0]} channels of "
            f"{shape[1]} steps (C, T), as nn.Conv1d takes them; 1 as {shape[0]} steps of {shape[1]} features (T, F), "
            "as nn.LSTM with batch_first takes them"
        )
    if len(shape) == 3:
        raise CoterieError(
            f"--normalise auto needs --channel-axis for samples of {size}: 0 for {shape[0]} channels (C, H, W), 2 for "
            f"{shape[2]} channels (H, W, C); --input image moves the channels first"
        )
    raise CoterieError(f"--normalise auto needs --channel-axis, from 0 to {len(shape) - 1}, for samples of {size}")


def moments(blocks: Iterable[Tensor], transform: Transform) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel or column, of pixels scaled to 0..1 and of encoded tables.

    blocks: (B, ...) raw samples. The standard deviation of a constant is set to 1.
    """
    prepare, parts = Preprocess(replace(transform, mean=(), std=()), torch.float64), list(blocks)

    def mean_of(f: Callable[[Tensor], Tensor]) -> Tensor:
        total, count = torch.zeros((), dtype=torch.float64), 0
        for x in parts:
            values = prepare(x).movedim(1 + transform.axis, -1)
            values = values.flatten(0, -2) if transform.padding is None else values[of_steps(x, transform)]
            total, count = total + f(values).sum(0), count + len(values)
        return total / count

    mean = mean_of(lambda values: values)
    std = mean_of(lambda values: (values - mean).square()).sqrt()
    std = torch.where(std > 1e-8 * mean.abs().clamp_min(1e-8), std, 1.0)
    return tuple(mean.tolist()), tuple(std.tolist())


def of_steps(x: Tensor, transform: Transform) -> Tensor:
    """(B, ...) which vectors of channels are no padding of series, for samples with the channels moved to the end."""
    places = x.movedim(1 + transform.axis, -1)[..., 0]
    if x.ndim < 3 or transform.padding is None or transform.axis == 0:
        return torch.ones_like(places, dtype=torch.bool)
    return real_steps(x, transform.padding).view(*x.shape[:2], *[1] * (x.ndim - 3)).expand_as(places)


def filled(data: FederatedData, missing: str) -> FederatedData:
    """Set fill values for a table if missing is "median": the training median, or the most frequent category.

    Columns with missing training values also get an indicator. missing: refuse or median.
    """
    columns = data.transform.columns
    known = data.train.x if data.validation is None else torch.cat([data.train.x, data.validation.x])
    for at, column in enumerate(columns):
        check_categories(column, known[:, at], data.test.x[:, at])
    if missing == "refuse" or not columns or not data.train.x.is_floating_point():
        return data
    made = tuple(fitted(column, data.train.x[:, at]) for at, column in enumerate(columns))
    return replace(data, transform=replace(data.transform, columns=made))


def fitted(column: Column, values: Tensor) -> Column:
    """Fit fill value and indicator. values (N,): training samples, NaN: missing."""
    if column.fill is not None:
        return column
    there = values[~values.isnan()].double()
    if not len(there):
        raise CoterieError(
            f"column '{column.name}' has no value in any training sample; leave it out with --drop-column"
        )
    fill = there.long().bincount().argmax() if column.categories else np.median(there.numpy())
    return replace(column, fill=float(fill), indicator=len(there) < len(values))


def check_categories(column: Column, known: Tensor, test: Tensor) -> None:
    """Refuse a category that only test samples have."""
    if not column.categories:
        return
    for code in sorted(set(test[~test.isnan()].long().tolist()) - set(known[~known.isnan()].long().tolist())):
        raise CoterieError(
            f"column '{column.name}': no training sample has the category '{column.categories[code]}', but a test "
            "sample has; merge rare categories, or leave the column out with --drop-column"
        )


def standardised(transform: Transform, train: NDArray[np.float32]) -> Transform:
    """A transform of columns that also standardizes their inputs. train: (n, F) raw training samples."""
    inputs = Preprocess(transform)(torch.from_numpy(train)).numpy()
    return replace(transform, mean=tuple(inputs.mean(axis=0).tolist()), std=tuple(inputs.std(axis=0).tolist()))
