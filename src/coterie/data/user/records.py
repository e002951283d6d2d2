"""Samples in memory by the names of their columns, as pairs of arrays, and as sequences of different lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from coterie.core.errors import CoterieError
from coterie.core.task import IGNORED
from coterie.data.user.padding import (
    Padding,
    check_ends,
    check_unused,
    extended,
    filled_up,
    is_tokens,
    padding_of_inputs,
    sequence_length,
    steps,
    tokens,
)
from coterie.data.user.reading import CLIENTS, LABELS, find_column
from coterie.data.user.several_inputs import check_lengths

SCALARS = (str, bytes, bool, int, float, np.generic, type(None))


class LabelledPairs:
    """Samples and labels as a map-style Dataset."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Any, Any]:
        return self.x[i], self.y[i]


class NamedColumns:
    """Columns (n, ...) by name, as a map-style Dataset of dictionaries."""

    def __init__(self, columns: Mapping[Any, Any]) -> None:
        self.columns = {name: as_rows(values) for name, values in columns.items()}
        check_lengths(self.columns, "columns")

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def __getitem__(self, i: int) -> dict[Any, Any]:
        return {name: values[i] for name, values in self.columns.items()}


def as_rows(values: Any) -> Any:
    """A column whose entries are found by position: a pandas Series is an array."""
    return values.to_numpy() if hasattr(values, "to_numpy") else values


class Given(NamedTuple):
    """The arguments of `clients_from`: a Dataset, or a list or dictionary of them, with their options."""

    train: Any
    test: Any
    client: Any
    group: Any
    label_column: str | None
    drop_column: str | None
    classes: Any = None  # names


SampleColumn = str | Sequence[str] | None  # several: inputs


def plain(given: Given, sample_column: SampleColumn, padding: Padding | None) -> Given:
    """The same samples as Datasets of (sample, label) or as tables; of one length if a padding id is given."""
    if sample_column is not None:
        given = given._replace(train=with_columns(given.train), test=with_columns(given.test))
    if isinstance(given.train, tuple) and isinstance(pair_of_arrays(given.train), tuple):
        given = given._replace(train=list(given.train))
    given = given._replace(train=each(pair_of_arrays, given.train), test=each(pair_of_arrays, given.test))
    if is_records(first(given.train)):
        given = without_names(given, sample_column)
    elif sample_column is not None:
        raise CoterieError("`sample_column` is for Datasets whose samples are dictionaries")
    return given if padding is None else padded(given, padding)


def with_columns(given: Any) -> Any:
    """The same, with dictionaries of columns as Datasets of dictionaries."""
    if not isinstance(given, Mapping):
        return [with_columns(one) for one in given] if isinstance(given, list | tuple) else given
    if given and all(isinstance(values, np.ndarray | torch.Tensor | list) for values in given.values()):
        return NamedColumns(given)
    return {key: NamedColumns(one) if isinstance(one, Mapping) else one for key, one in given.items()}


def each(change: Callable[[Any], Any], given: Any) -> Any:
    """Change one Dataset, or each of a list or dictionary of them."""
    if isinstance(given, Mapping):
        return {key: change(one) for key, one in given.items()}
    return [change(one) for one in given] if isinstance(given, list) else change(given)


def every(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given.values()) if isinstance(given, Mapping) else given if isinstance(given, list) else [given]


def first(given: Any) -> Any:
    return next(iter(every(given)), None)


def pair_of_arrays(given: Any) -> Any:
    """(x, y), two arrays of the same length, as a Dataset; anything else as it is. x: also a dictionary of inputs."""
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], Mapping) and is_sequence(given[1]):
        x, y = given
        check_lengths({**x, "the labels": y}, "inputs and labels")
        return LabelledPairs(NamedColumns(x), as_rows(y))
    if isinstance(given, tuple) and len(given) == 2 and is_sequences(given[0]) and is_sequence(given[1]):
        x, y = given
        check_lengths({"the samples": x, "the labels": y}, "samples and labels")
        return LabelledPairs(x, as_rows(y))
    if not (
        isinstance(given, tuple) and len(given) == 2 and all(isinstance(a, np.ndarray | torch.Tensor) for a in given)
    ):
        return given
    x, y = given
    if not (x.ndim and y.ndim and len(x) == len(y)):
        raise CoterieError(f"a pair of arrays of shapes {tuple(x.shape)} and {tuple(y.shape)} does not match")
    return LabelledPairs(x, y)


def is_sequence(given: Any) -> bool:
    return hasattr(given, "__len__") and not isinstance(given, Mapping | str)


def is_sequences(given: Any) -> bool:
    """Whether this is a list of arrays, which may differ in length."""
    listed = isinstance(given, list) or (isinstance(given, np.ndarray) and given.dtype == object)
    return listed and len(given) > 0 and all(isinstance(one, np.ndarray | torch.Tensor) for one in given)


def is_records(given: Any) -> bool:
    """Whether the samples of a Dataset are dictionaries, as those of `datasets.Dataset` are."""
    if isinstance(given, Mapping | list | tuple | str | type(None)) or not hasattr(given, "__getitem__"):
        return False
    return (
        hasattr(given, "__len__")
        and not hasattr(given, "to_numpy")
        and len(given) > 0
        and isinstance(given[0], Mapping)
    )


def without_names(given: Given, sample_column: SampleColumn) -> Given:
    """Datasets of (sample, label) from Datasets of dictionaries; or tables, if all columns are numbers and text."""
    train, test = each(columns_of, given.train), None if given.test is None else each(columns_of, given.test)
    one = not isinstance(given.train, Mapping | list)
    columns: dict[str, list[Any]] = train if one else first(train)
    nested = [name for name, values in columns.items() if not isinstance(values[0], SCALARS)]
    if not nested and sample_column is None:
        return given._replace(train=train, test=test)
    names = list(columns)
    label = find_column(names, given.label_column, LABELS, "label", "the dataset")
    client, group = given.client, given.group
    if not one and isinstance(client, str):
        raise CoterieError("`client` names a column of one Dataset for all clients, not of a Dataset per client")
    if one and client is None:
        client = find_column(names, None, CLIENTS, "client", "the dataset")
    roles = {label, *(role for role in (client, group) if isinstance(role, str))}
    dropped = {name.strip() for name in (given.drop_column or "").split(",")}
    rest = [name for name in names if name not in roles | dropped]
    if sample_column is None and len(rest) != 1:
        raise CoterieError(
            f"which column is the sample? Name it with `sample_column`; columns: {', '.join(rest)} (for several "
            "inputs, name their columns, separated by commas)"
        )
    several = not isinstance(sample_column, str | None) or "," in (sample_column or "")
    chosen = sample_column.split(",") if isinstance(sample_column, str) else sample_column or rest
    samples = [find_column(names, str(one).strip(), (), "sample", "the dataset") for one in chosen]
    if used := roles & set(samples):
        raise CoterieError(f"column '{used.pop()}' cannot be an input: it is the label, the client or the group")

    def values(role: Any) -> Any:
        """One value per sample, if a column is named."""
        if not isinstance(role, str):
            return role
        find_column(names, role, (), "client or group", "the dataset")
        return train[role] if one else each(lambda table: table.get(role, []), train)

    def pairs(table: Any) -> Any:
        own = {name: table.get(name, []) for name in samples}
        return LabelledPairs(NamedColumns(own) if several else own[samples[0]], table.get(label, []))

    made = pairs(train) if one else each(pairs, train)
    held = None if test is None else pairs(test) if one else each(pairs, test)
    known = getattr((getattr(first(given.train), "features", None) or {}).get(label), "names", None)  # a ClassLabel's
    return Given(made, held, values(client), values(group), None, None, given.classes or known)


def columns_of(given: Any) -> dict[str, list[Any]]:
    """Column -> values of all samples."""
    rows = [given[i] for i in range(len(given))]
    names = list(rows[0]) if rows else []
    for i, row in enumerate(rows):
        if not isinstance(row, Mapping) or list(row) != names:
            raise CoterieError(f"sample {i} does not have the columns of the first one: {', '.join(map(str, names))}")
    return {str(name): [row[name] for row in rows] for name in names}


def padded(given: Given, padding: Padding) -> Given:
    """Sequences (T, ...), padded at the end to the longest of all clients; labels of their steps get -1: no loss."""
    train, test = (None if part is None else each(rows_of, part) for part in (given.train, given.test))
    pairs = [pair for rows in (*every(train), *every(test)) for pair in rows]
    if any(isinstance(x, Mapping) != isinstance(padding, Mapping) for x, _ in pairs):
        raise CoterieError("`padding` is one id, or for several inputs a dictionary: {'tokens': 0, 'mask': 0}")
    ids = not isinstance(padding, Mapping) and any(is_tokens(np.asarray(x)) for x, _ in pairs)
    if isinstance(padding, Mapping):
        fill = padding_of_inputs(pairs, padding)
    else:
        longest = max((len(tokens(x) if ids else steps(x)) for x, _ in pairs), default=0)

        def fill(sample: Any) -> Any:
            return filled_up(tokens(sample), longest, int(padding)) if ids else extended(sample, longest, padding)

    sizes = [sequence_length(x, padding) for x, _ in pairs]
    per_token = all(np.ndim(y) == 1 and len(y) == size for size, (_, y) in zip(sizes, pairs, strict=True))
    if ids and not isinstance(padding, Mapping):
        check_unused(pairs, padding, per_token)
    elif not isinstance(padding, Mapping):
        check_ends(pairs, padding)
    most = max(sizes, default=0)

    def pad(rows: Rows) -> LabelledPairs:
        y = [filled_up(tokens(label), most, IGNORED) if per_token else label for _, label in rows]
        return LabelledPairs([fill(sample) for sample, _ in rows], y)

    return given._replace(train=each(pad, train), test=None if test is None else each(pad, test))


Rows = tuple[tuple[Any, Any], ...]


def rows_of(given: Any) -> Rows:
    """The samples of a Dataset, each read once."""
    rows = tuple(given[i] for i in range(len(given)))
    if any(not isinstance(pair, tuple | list) or len(pair) != 2 for pair in rows):
        raise CoterieError("`padding` is for Datasets of (sample, label), whose samples are sequences of token ids")
    return rows
