"""Any torch Dataset, or one for each client."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

from coterie.core.errors import CoterieError
from coterie.core.samples import FederatedData, Transform
from coterie.data.gather import divide, federate
from coterie.data.own.pooled import pool
from coterie.data.own.reading import Array, Found, Notes, Part, Reading, by_client, upright, whole_labels
from coterie.data.statistics import normalised


def clients_from(
    train: Any,
    test: Any = None,
    *,
    client: Sequence[Any] | None = None,
    classes: Sequence[str] | None = None,
    name: str = "own",
    test_share: float = 0.25,
    seed: int = 0,
    validation: float = 0.0,
    normalise: str | None = None,
    transform: Transform | None = None,
) -> FederatedData:
    """The data of a federation from torch Datasets of (sample, label).

    train: a list of them, one per client, or a dictionary by client name; or one Dataset, and `client` says whose
    each sample is. test: the same; if not given, a share of each client's samples is set aside, stratified by class.
    """
    reading = Reading(test_share=test_share, split_seed=seed)
    reading.check()
    notes = Notes()
    parts = parts_of(train, client, None if test is None else "train", notes)
    if test is not None:
        if client is not None:
            raise CoterieError("with `client`, the split is made here: give all samples as one Dataset, and no test")
        known = {part.client for part in parts}
        parts += parts_of(test, None, "test", notes)
        if strangers := [part.client for part in parts if part.client not in known]:
            raise CoterieError(f"test samples of clients that do not train: {', '.join(strangers[:5])}")
    pooled = pool(Found("torch Datasets", parts, tuple(classes) if classes else None), reading, notes, name)
    if notes.errors:
        raise CoterieError("; ".join(map(str, notes.errors)))
    source = pooled.dataset(name, reading)
    data = federate(source, divide(source, "natural"), validation, seed)
    return normalised(data, transform or data.transform, normalise)


def parts_of(given: Any, client: Sequence[Any] | None, split: str | None, notes: Notes) -> list[Part]:
    if client is not None:
        x, y = read_dataset(given, "the dataset")
        owners = np.asarray(client)
        if owners.shape != (len(x),):
            raise CoterieError(f"`client` must say for each of {len(x)} samples whose it is; it has {owners.shape}")
        place = rows_of("the dataset")
        return by_client(upright(x), whole_labels(y, notes, place), owners, split, place)
    if not isinstance(given, (Sequence, Mapping)) or isinstance(given, str):
        raise CoterieError("give a list of Datasets, one per client, or one Dataset and `client`, whose each sample is")
    named = given.items() if isinstance(given, Mapping) else enumerate(given)
    parts = []
    for key, dataset in named:
        where = f"client {key}" + (f", {split}" if split else "")
        x, y = read_dataset(dataset, where)
        place = rows_of(where)
        parts.append(Part(str(key), split, upright(x), whole_labels(y, notes, place), place))
    return parts


def rows_of(where: str) -> Callable[[int], str]:
    return lambda i: f"{where}, sample {i}"


def read_dataset(dataset: Any, where: str) -> tuple[Array, Array]:
    """Samples (n, ...) and labels (n,) of a Dataset that knows its length."""
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2:
        return as_array(dataset.tensors[0]), as_array(dataset.tensors[1])
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise CoterieError(f"{where}: {type(dataset).__name__} is not a Dataset that knows its length")
    x, y = [], []
    for i in range(len(dataset)):
        sample = dataset[i]
        if not isinstance(sample, (tuple, list)) or len(sample) != 2:
            raise CoterieError(f"{where}, sample {i}: a pair of sample and label is expected")
        x.append(as_array(sample[0]))
        y.append(as_array(sample[1]))
        if x[-1].shape != x[0].shape:
            raise CoterieError(f"{where}, sample {i}: its shape is {x[-1].shape}, that of the first {x[0].shape}")
        if y[-1].size != 1:
            raise CoterieError(f"{where}, sample {i}: its label must be one number, not of shape {y[-1].shape}")
    labels = np.array([label.reshape(()) for label in y]) if y else np.empty(0, np.int64)
    return (np.stack(x) if x else np.empty((0, 1), np.float32)), labels


def as_array(value: Any) -> Array:
    """Of a tensor, an array, a number or a Pillow image."""
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
