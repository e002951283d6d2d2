"""`clients_from` with columns named, with arrays, and with sequences of different lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

import coterie
from coterie.core.errors import CoterieError
from coterie.core.packing import unpack
from coterie.data.user.records import Given, plain

DRAW = np.random.default_rng(9)


class Made(Dataset[Any]):
    def __init__(self, samples: int, make: Callable[[int], Any]) -> None:
        self.samples, self.make = samples, make

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, i: int) -> Any:
        return self.make(i)


SERIES = torch.randn(12, 3, 20)


def ward(first: int) -> Made:
    return Made(6, lambda i: {"signal": SERIES[first + i], "label": i % 2, "patient": f"p{i // 2}", "note": "x"})


def test_samples_with_named_columns() -> None:
    both = [ward(0), ward(6)]
    data = coterie.clients_from(both, sample_column="signal", group="patient", test_share=0.34)
    assert data.shape == (3, 20)
    assert data.train.group is not None
    assert data.test.group is not None
    assert not set(data.train.group.tolist()) & set(data.test.group.tolist())
    pairs = [TensorDataset(SERIES[:6], torch.arange(6) % 2), TensorDataset(SERIES[6:], torch.arange(6) % 2)]
    expected = coterie.clients_from(pairs)
    named = coterie.clients_from(both, drop_column="patient,note")
    assert torch.equal(named.train.x, expected.train.x)
    assert torch.equal(named.test.y, expected.test.y)


def test_one_dataset_with_a_client_column() -> None:
    datasets = pytest.importorskip("datasets")
    content = {"x": SERIES[:, 0].tolist(), "kind": [0, 1] * 6, "user": ["north"] * 5 + ["south"] * 7}
    kinds = datasets.Features(
        {
            "x": datasets.Sequence(datasets.Value("float32")),
            "kind": datasets.ClassLabel(names=["no", "yes", "perhaps"]),
            "user": datasets.Value("string"),
        }
    )
    data = coterie.clients_from(datasets.Dataset.from_dict(content, kinds), label_column="kind")
    assert (data.client_names, data.class_names) == (("north", "south"), ("no", "yes", "perhaps"))
    assert data.train.sizes[0] + data.test.sizes[0] == 5
    table = datasets.Dataset.from_dict({"age": list(range(12)), "y": [0, 1] * 6, "site": ["a", "b", "c"] * 4})
    rows = coterie.clients_from(table)
    assert ([column.name for column in rows.transform.columns], rows.client_names) == (["age"], ("a", "b", "c"))


def test_arrays() -> None:
    x, y = DRAW.normal(size=(12, 4)).astype(np.float32), np.arange(12) % 3
    expected = coterie.clients_from({"a": TensorDataset(torch.tensor(x), torch.tensor(y))})
    for pair in ((x, y), (torch.tensor(x), torch.tensor(y)), (x, torch.tensor(y))):
        assert torch.equal(coterie.clients_from({"a": pair}).train.x, expected.train.x)
    whole = coterie.clients_from((x, y), client=["a"] * 6 + ["b"] * 6)
    assert whole.client_names == ("a", "b")
    with pytest.raises(CoterieError, match=r"shapes \(12, 4\) and \(11,\) does not match"):
        coterie.clients_from([(x, y[1:])])


def test_sequences_of_different_lengths() -> None:
    """All clients have the length of the longest sequence, in training and test."""
    train = [Made(8, lambda i: (torch.arange(1, 3 + i % 3), i % 2)), Made(8, lambda i: (list(range(1, 8)), i % 2))]
    test = [Made(2, lambda i: (np.arange(1, 10), i)), Made(2, lambda i: ([5], i))]
    data = coterie.clients_from(train, test, padding=0)
    assert (data.shape, data.train.x.dtype) == ((9,), torch.int64)
    assert data.train.client(0)[0][0].tolist() == [1, 2, 0, 0, 0, 0, 0, 0, 0]
    assert data.test.client(1)[0][0].tolist() == [5, 0, 0, 0, 0, 0, 0, 0, 0]
    with pytest.raises(CoterieError, match="differs from the first sample's"):
        coterie.clients_from(train)


def test_series_of_different_lengths_are_padded_along_time() -> None:
    """As the only input and as one of several."""
    series = [DRAW.normal(size=(2 + i % 3, 5)).astype(np.float32) for i in range(8)]
    plain_one = coterie.clients_from([Made(8, lambda i: (series[i], i % 2))], padding=-1.0)
    named = coterie.clients_from([({"x": series}, [i % 2 for i in range(8)])], padding={"x": -1.0})
    assert (plain_one.shape, plain_one.transform.padding) == ((4, 5), -1.0)
    x = torch.cat([plain_one.train.x, plain_one.test.x])
    assert sorted((row == -1).all(1).sum().item() for row in x) == [0, 0, 1, 1, 1, 2, 2, 2]
    assert torch.equal(unpack(named.transform.inputs, named.train.x)["x"], plain_one.train.x)


def test_labels_of_tokens_are_padded_without_a_loss() -> None:
    dataset = Made(2, lambda i: (np.arange(3 + i), np.arange(1, 4 + i)))
    made = plain(Given([dataset], None, None, None, None, None), None, 99).train[0]
    assert made[0][0].tolist() == [0, 1, 2, 99]
    assert made[0][1].tolist() == [1, 2, 3, -1]
    assert made[1][1].tolist() == [1, 2, 3, 4]
    several = Made(
        2, lambda i: (np.arange(3 + i), np.array([0, 1, 1]))
    )  # three labels of the sequence, not of its tokens
    assert plain(Given([several], None, None, None, None, None), None, 99).train[0][0][1].tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("given", "options", "says"),
    [
        ([ward(0)], {}, "which column is the sample\\? Name it with `sample_column`; columns: signal, patient, note"),
        ([ward(0)], {"sample_column": "signals"}, "did you mean 'signal'"),
        ([ward(0)], {"sample_column": "signal", "label_column": "labl"}, "did you mean 'label'"),
        ([ward(0)], {"sample_column": "signal", "client": "patient"}, "`client` names a column of one Dataset"),
        (ward(0), {"sample_column": "signal"}, "which column is the client\\?"),
        (ward(0), {"sample_column": "signal", "client": "patent"}, "did you mean 'patient'"),
        ([TensorDataset(torch.ones(2, 1), torch.ones(2))], {"sample_column": "x"}, "samples are dictionaries"),
        ([Made(3, lambda i: {"x": [1], "y": 0} if i < 2 else {"x": [1]})], {}, "sample 2 does not have the columns"),
        ([Made(3, lambda i: (0.5, 0))], {"padding": 0}, "`padding` is for sequences of token ids or numbers"),
        ([Made(3, lambda i: ([1] if i else [0.5], 0))], {"padding": 0}, "some samples are sequences of token ids"),
        ([Made(3, lambda i: ([1] * (i + 1), 0))], {"padding": 0.5}, "`padding` of token ids is one of them, got 0.5"),
        ([Made(3, lambda i: [1] * i)], {"padding": 0}, r"Datasets of \(sample, label\)"),
    ],
)
def test_refused(given: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(CoterieError, match=says):
        coterie.clients_from(given, **options)


def test_tables_of_different_columns_name_the_client() -> None:
    north = {"a": [1.0, 2.0] * 4, "b": [3.0, 4.0] * 4, "y": [0, 1] * 4}
    less = {name: values for name, values in north.items() if name != "b"}
    for south, said in ((less, "missing: b"), ({**north, "z": north["a"]}, "unexpected: z")):
        with pytest.raises(CoterieError, match=rf"client south: columns differ from .* the first table \({said}\)"):
            coterie.clients_from({"north": north, "south": south}, label_column="y")


def test_files_are_not_data_in_memory() -> None:
    with pytest.raises(CoterieError, match=r"takes data in memory; read files with coterie\.load_clients\('plants'"):
        coterie.clients_from("plants", label_column="yield")  # type: ignore[arg-type]
