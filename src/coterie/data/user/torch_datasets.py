"""Build a federation from torch Datasets or from tables in memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

from coterie.core.data import FederatedData, Transform
from coterie.core.errors import CoterieError
from coterie.core.task import Task
from coterie.core.tasks import task_class
from coterie.data.gather import divide, federate
from coterie.data.statistics import filled, normalised
from coterie.data.task_choice import with_task
from coterie.data.user.bounds import Unusable
from coterie.data.user.columnar import frame_of_columns, is_columnar, names_of_columns
from coterie.data.user.frames import Columns, Frame, unified
from coterie.data.user.labels import as_labels
from coterie.data.user.pooled import pool
from coterie.data.user.reading import (
    Array,
    Found,
    Notes,
    Part,
    Reading,
    as_names,
    by_client,
    rows_in,
)
from coterie.data.user.records import Given, plain
from coterie.data.user.several_inputs import has_fields, refuse_transform, stacked_inputs, typed
from coterie.data.user.tables import choose, own_groups, same_columns


def clients_from(
    train: Any,
    test: Any = None,
    *,
    client: Sequence[Any] | str | None = None,
    group: Any = None,
    classes: Sequence[str] | None = None,
    task: str | type[Task] | Task | None = None,
    task_args: Mapping[str, Any] | str | None = None,
    metric: str | None = None,
    label_column: str | None = None,
    drop_column: str | None = None,
    sample_column: str | Sequence[str] | None = None,
    padding: float | Mapping[str, float] | None = None,
    name: str = "own",
    input: str | Mapping[str, str] = "auto",
    missing: str = "refuse",
    test_share: float = 0.25,
    seed: int = 0,
    validation: float = 0.0,
    normalise: str | None = None,
    channel_axis: int | Mapping[str, int] | None = None,
    transform: Transform | None = None,
) -> FederatedData:
    """Build a federation from Datasets of (sample, label), pairs of arrays, DataFrames or dictionaries of columns.

    A sample may have several inputs: a dictionary by name, as in ({"image": images, "age": ages}, labels).

    train: a list with one per client, or a dictionary by client name; or a single one for all clients, with `client`
    as the client of each sample (for a table: the name of a column).
    test: in the same form; default: a share of each client's samples, stratified by class.
    group: samples with the same value (patient, recording) stay on one side of every split: one value per sample, in
    the form of `train`; for tables the name of a column.
    task: "classification", "multi-label", "regression", "segmentation", "next-token", the import path or class of your
    own, or a Task; default: guessed from the labels. task_args: its options, such as {"loss": "huber"}.
    metric: the metric that decides and is shown, such as "auroc"; default: the first of the task.
    label_column: for tables; several are separated by commas.
    sample_column: for Datasets whose samples are dictionaries, such as `datasets.Dataset`: the column of the samples;
    label_column, client and group name others. Default: the only other column; if all hold numbers and text, a table.
    Several inputs: their columns, separated by commas.
    padding: token id that fills sequences of different lengths up to the longest, or number that fills series (T, F);
    labels per token are filled with -1, which has no loss. Several inputs: a value for each that is padded,
    {"tokens": 0, "mask": 0}.
    input: type of the samples: "image", "series", "values", "tokens" or "auto", as --input on the command line.
    Several inputs: a dictionary with the types of some, as for channel_axis.
    missing: "refuse" or "median", for tables. normalise: "auto" for mean and standard deviation of the training samples
    per channel; channel_axis: the channel axis of one sample, 0 for (C, T), 1 for (T, F).

    >>> from torch.utils.data import TensorDataset
    >>> wards = {w: TensorDataset(torch.randn(40, 5), torch.randint(0, 2, (40,))) for w in ("north", "south")}
    >>> clients_from(wards).client_names
    ('north', 'south')
    """
    if isinstance(train, (str, os.PathLike)):
        raise CoterieError(f"clients_from takes data in memory; read files with coterie.load_clients('{train}', ...)")
    given = Given(train, test, client, group, label_column, drop_column, classes)
    train, test, client, group, label_column, drop_column, classes = plain(given, sample_column, padding)
    tables = is_table_like(train)
    kinds = None if isinstance(input, str) else dict(input)
    reading = Reading(
        label_column=label_column,
        client_column=client if isinstance(client, str) else None,
        group_column=group if isinstance(group, str) else None,
        drop_column=drop_column,
        input=input if isinstance(input, str) else "auto",
        missing=missing,
        task=None if task is None else task if isinstance(task, str) else task.name,
        test_share=test_share,
        split_seed=seed,
    )
    reading.check()
    if not tables and any((reading.label_column, reading.client_column, reading.group_column, reading.drop_column)):
        raise CoterieError(
            "column names are for tables; for Datasets, pass `client` and `group` with one value per sample"
        )
    if test is not None and client is not None:
        raise CoterieError("`client` and `test` cannot be combined: pass all samples as `train`")
    notes = Notes()
    if tables:
        found = tables_of(train, test, reading, notes)
    else:
        parts = parts_of(train, client, None if test is None else "train", group, notes)
        parts += [] if test is None else parts_of(test, None, "test", None, notes)
        found = Found("torch Datasets", parts)
    if any(has_fields(part.x) for part in found.parts):
        found = found._replace(parts=[typed(part, kinds or {}, notes) for part in found.parts])
    elif kinds is not None:
        raise CoterieError("`input` by name is for samples with several inputs, which are dictionaries")
    known = {part.client for part in found.parts if part.split != "test"}
    if strangers := [part.client for part in found.parts if part.client not in known]:
        raise CoterieError(f"test samples of clients without training samples: {', '.join(strangers[:5])}")
    kind = type(task) if isinstance(task, Task) else None if task is None else task_class(task)
    pooled = pool(found._replace(classes=tuple(classes) if classes else None), reading, notes, name, kind)
    if notes.errors:
        raise CoterieError("; ".join(map(str, notes.errors)))
    source = pooled.dataset(name, reading)
    data = federate(source, divide(source, "natural"), validation, seed)
    data = filled(with_task(data, task, metric, task_args), missing)
    data = replace(data, transform=with_padding(data.transform, padding))
    refuse_transform(data, transform)
    if transform is not None and not transform.columns:
        transform = replace(transform, columns=data.transform.columns)
    transform = None if transform is None else with_padding(transform, padding)
    return normalised(data, transform or data.transform, normalise, channel_axis)


def with_padding(transform: Transform, padding: float | Mapping[str, float] | None) -> Transform:
    if isinstance(padding, Mapping):
        return replace(transform, inputs=tuple(replace(one, padding=padding.get(one.name)) for one in transform.inputs))
    return replace(transform, padding=padding)


def is_table_like(given: Any) -> bool:
    """Whether this is a DataFrame or a dictionary of columns, or one for each client."""
    if isinstance(given, Mapping):
        return is_columnar(given) or (bool(given) and all(map(is_columnar, given.values())))
    if isinstance(given, (list, tuple)):
        return bool(given) and all(map(is_columnar, given))
    return is_columnar(given)


def tables_of(train: Any, test: Any, reading: Reading, notes: Notes) -> Found:
    read: list[tuple[str | None, str | None, Frame]] = []  # client, split, rows
    columns: Columns | None = None
    for given, split in ((train, None if test is None else "train"), (test, "test")):
        if given is None:
            continue
        if reading.client_column is not None or is_columnar(given):
            tables: list[tuple[str | None, Any]] = [(None, given)]
        else:
            tables = [(str(k), t) for k, t in (given.items() if isinstance(given, Mapping) else enumerate(given))]
        for client, table in tables:
            where = "the table" if client is None else f"client {client}" + (f", {split}" if split else "")
            names = names_of_columns(table, where)
            columns = columns or choose(names, reading, client is None, where)
            try:
                same_columns(columns, names, reading.dropped)
            except Unusable as error:
                raise CoterieError(f"{where}: {error}") from None
            read.append((client, split, frame_of_columns(table, columns, notes, where)))
    assert columns is not None
    text = {column for _, _, frame in read for column in frame.texts}
    for _, _, frame in read:
        for column in text - set(frame.texts):
            if not np.isnan(frame.x[:, column]).all():
                raise CoterieError(
                    f"{frame.place(0)}: column '{columns.features[column]}' holds numbers here and text elsewhere"
                )
            frame.texts[column] = []
    features = unified([frame for _, _, frame in read], columns.features, notes)
    parts: list[Part] = []
    for client, split, frame in read:
        assert frame.y is not None
        if client is None:
            assert frame.owners is not None
            parts += by_client(frame.x, frame.y, frame.owners, split, frame.place, frame.group)
        else:
            parts.append(Part(client, split, frame.x, frame.y, frame.place, own_groups(frame.group, client)))
    return Found("tables", parts, None, columns.labels, features)


def parts_of(given: Any, client: Any, split: str | None, group: Any, notes: Notes) -> list[Part]:
    if client is not None:
        x, y = read_dataset(given, "the dataset")
        owners = np.asarray(client)
        if owners.shape != (len(x),):
            raise CoterieError(f"`client` must have one value for each of {len(x)} samples, got shape {owners.shape}")
        place = rows_in("the dataset", "sample")
        return by_client(x, as_labels(y, place), owners, split, place, groups_of(group, len(x), "", place))
    if not isinstance(given, (Sequence, Mapping)) or isinstance(given, str):
        raise CoterieError("pass a list of Datasets, one per client, or one Dataset and `client`, one name per sample")
    named = dict(given.items() if isinstance(given, Mapping) else enumerate(given))
    if group is not None and not isinstance(group, Mapping):
        group = dict(enumerate(group))
    if group is not None and set(group) != set(named):
        raise CoterieError("`group` must have an entry for each client, like `train`")
    parts = []
    for key, dataset in named.items():
        where = f"client {key}" + (f", {split}" if split else "")
        x, y = read_dataset(dataset, where)
        place = rows_in(where, "sample")
        own = None if group is None else groups_of(group[key], len(x), f"{key}/", place)
        parts.append(Part(str(key), split, x, as_labels(y, place), place, own))
    return parts


def groups_of(group: Any, samples: int, prefix: str, place: Callable[[int], str]) -> Array | None:
    """(n,) group names. prefix: of the client, if groups belong to one client."""
    if group is None:
        return None
    values = as_array(group)
    if values.shape != (samples,):
        raise CoterieError(
            f"{place(0)}: `group` must have one value for each of {samples} samples, got shape {values.shape}"
        )
    names = as_names(values, place)
    return np.where(names == "", "", np.char.add(prefix, names))


def read_dataset(dataset: Any, where: str) -> tuple[Array, Array]:
    """Samples (n, ...) and labels (n, ...) of a map-style Dataset."""
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2:
        return as_array(dataset.tensors[0]), as_array(dataset.tensors[1])
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise CoterieError(f"{where}: {type(dataset).__name__} is not a Dataset with __len__ and __getitem__")
    x, y, named = [], [], []
    for i in range(len(dataset)):
        sample = dataset[i]
        if not isinstance(sample, (tuple, list)) or len(sample) != 2:
            raise CoterieError(
                f"{where}, sample {i}: expected a pair (sample, label), got {type(sample).__name__}; a table is one "
                "DataFrame with its label in a column, arrays are a pair (x, y)"
            )
        if isinstance(sample[0], Mapping):
            named.append(sample[0])
        x.append(as_array(0 if isinstance(sample[0], Mapping) else sample[0], f"{where}, sample {i}"))
        y.append(None if sample[1] is None else as_array(sample[1], f"the label of {where}, sample {i}"))
        if x[-1].shape != x[0].shape:
            hint = "; series (T, F) of different lengths need padding=NUMBER" if x[-1].ndim == x[0].ndim <= 2 else ""
            raise CoterieError(
                f"{where}, sample {i}: shape {x[-1].shape} differs from the first sample's {x[0].shape}{hint}"
            )
    if named:
        if len(named) < len(x):
            raise CoterieError(f"{where}: some samples are dictionaries of inputs, others are not")
        return stacked_inputs(named, as_array, where), joined(y, where)
    return (np.stack(x) if x else np.empty((0, 1), np.float32)), joined(y, where)


def joined(labels: list[Array | None], where: str) -> Array:
    """(n, ...) the labels of all samples; objects if text labels are missing (None)."""
    known = [label for label in labels if label is not None]
    if not known:
        return np.full(len(labels), np.nan) if labels else np.empty(0, np.int64)
    if other := [label.shape for label in known if label.shape != known[0].shape]:
        raise CoterieError(f"{where}: labels of shape {known[0].shape} and of shape {other[0]}")
    if len(known) == len(labels):
        return np.stack(known)
    if known[0].dtype.kind in "iubf" and known[0].size == 1:
        return np.array([np.nan if label is None else float(label.reshape(())) for label in labels], np.float64)
    return np.array([None if label is None else label.item() if label.size == 1 else label for label in labels], object)


def as_array(value: Any, where: str = "") -> Array:
    """Convert a tensor, an array, a number, text or a Pillow image."""
    try:
        return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
    except ValueError:  # lists of different lengths
        raise CoterieError(f"{where}: lists of different lengths; all samples must have the same shape") from None
