"""`clients_from` and .npz files with several inputs: read as they are meant, or refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import coterie
from coterie.core.data import FederatedData, Transform
from coterie.core.errors import CoterieError
from coterie.core.packing import unpack
from coterie.data.user import check, lines
from coterie.data.user.export import export_clients

DRAW = np.random.default_rng(4)


def ward(n: int = 12) -> tuple[dict[str, Any], Any]:
    inputs = {
        "image": DRAW.integers(0, 256, (n, 1, 4, 4), dtype=np.uint8),
        "age": DRAW.normal(50, 10, n),
        "mask": DRAW.random((n, 3)) < 0.5,
        "tokens": DRAW.integers(0, 2**40, (n, 3)),
    }
    return inputs, np.arange(n) % 2


def by_name(data: FederatedData, split: str = "train") -> dict[str, torch.Tensor]:
    return unpack(data.transform.inputs, getattr(data, split).x)


class Samples(Dataset[Any]):
    def __init__(self, inputs: dict[str, Any], y: Any) -> None:
        self.inputs, self.y = inputs, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> Any:
        return {name: torch.as_tensor(values[i]) for name, values in reversed(self.inputs.items())}, int(self.y[i])


class Records(Samples):
    def __getitem__(self, i: int) -> Any:
        return {name: values[i] for name, values in self.inputs.items()} | {"sick": self.y[i], "note": "x"}


def test_every_form_gives_the_same_federation() -> None:
    x, y = ward()
    twins = {"a": (x, y), "b": ward()}
    expected = coterie.clients_from({"a": twins["a"]}, test_share=0.25)
    whole = {**x, "sick": y, "site": ["a"] * len(y)}
    forms = [
        coterie.clients_from({"a": ({k: torch.as_tensor(v) for k, v in x.items()}, torch.as_tensor(y))}),
        coterie.clients_from({"a": ({k: v.tolist() if k == "age" else v for k, v in x.items()}, y.tolist())}),
        coterie.clients_from((x, y), client=["a"] * 12),
        coterie.clients_from({"a": Records(x, y)}, sample_column="image,age,mask,tokens", label_column="sick"),
        coterie.clients_from({"a": {**x, "sick": y}}, sample_column=list(x), label_column="sick"),
        coterie.clients_from(whole, sample_column=list(x), label_column="sick", client="site"),
    ]
    for data in forms:
        assert data.client_names == ("a",)
        assert [one.name for one in data.transform.inputs] == list(x)
        for split in ("train", "test"):
            assert torch.equal(getattr(data, split).x, getattr(expected, split).x)
            assert torch.equal(getattr(data, split).y, getattr(expected, split).y)
    other = coterie.clients_from({"a": Samples(x, y)}, {"a": (x, y)})  # inputs in another order
    assert [one.name for one in other.transform.inputs] == list(reversed(x))
    for name, values in by_name(other).items():
        assert torch.equal(values, by_name(other, "test")[name])
    both = coterie.clients_from({"a": (x, y), "b": Samples(*twins["b"])})
    assert torch.equal(both.train.client(0)[0], expected.train.x)


def test_values_arrive_as_they_are() -> None:
    x, y = ward()
    data = coterie.clients_from({"a": (x, y)}, {"a": (x, y)})
    made = by_name(data, "test")
    assert [str(one) for one in data.transform.inputs] == [
        "image (1, 4, 4) uint8",
        "age () float32",
        "mask (3,) bool",
        "tokens (3,) int64",
    ]
    for name, values in x.items():
        assert np.array_equal(made[name].numpy(), values.astype(np.float32) if name == "age" else values)
    assert "sample: image (1, 4, 4) uint8, age () float32" in repr(data)


def test_types_and_statistics_by_name() -> None:
    x, y = ward(40)
    x["steps"] = DRAW.normal(3, 2, (40, 2, 5))
    options = {"normalise": "auto", "channel_axis": {"steps": 0}, "input": {"tokens": "values"}}
    data = coterie.clients_from({"a": (x, y)}, {"a": (x, y)}, **options)
    for one in data.transform.inputs:
        axes = tuple(at for at in range(1 + len(one.shape)) if at != 1 or not one.shape)
        if one.name == "mask":
            assert one.mean == ()
        else:
            values = x[one.name].astype(np.float32).astype(np.float64) / (255 if one.name == "image" else 1)
            assert np.allclose(one.mean, values.mean(axes))
            assert np.allclose(one.std, values.std(axes))


def test_sequences_are_padded_by_name() -> None:
    texts = {"input_ids": [[5, 6, 7], [8], [9, 9]], "attention_mask": [[1, 1, 1], [1], [1, 1]], "age": [1.0, 2.0, 3.0]}
    padding = {"input_ids": 1, "attention_mask": 0}
    data = coterie.clients_from({"a": (texts, [0, 1, 0])}, {"a": (texts, [0, 1, 0])}, padding=padding)
    made = by_name(data)
    assert made["input_ids"].tolist() == [[5, 6, 7], [8, 1, 1], [9, 9, 1]]
    assert made["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0], [1, 1, 0]]
    assert made["age"].tolist() == [1, 2, 3]
    series = {"ecg": [np.ones((n, 2), np.float32) for n in (2, 4)]}
    steps = coterie.clients_from({"a": (series, [0, 1])}, {"a": (series, [0, 1])}, padding={"ecg": -1.0})
    assert by_name(steps)["ecg"][0].tolist() == [[1, 1], [1, 1], [-1, -1], [-1, -1]]
    labelled = coterie.clients_from(
        {"a": (texts, [[6, 7, 0], [0], [9, 0]])}, {"a": (texts, [[6, 7, 0], [0], [9, 0]])}, padding=padding,
        task="next-token",
    )  # fmt: skip
    assert labelled.train.y.tolist() == [[6, 7, 0], [0, -1, -1], [9, 0, -1]]
    assert labelled.task.width == 10


def test_files(tmp_path: Path) -> None:
    x, y = ward(20)
    client = np.array(["a"] * 10 + ["b"] * 10)
    np.savez(tmp_path / "wards.npz", y=y, client=client, **{f"x.{name}": values for name, values in x.items()})
    data = coterie.load_clients(str(tmp_path / "wards.npz"))
    expected = coterie.clients_from((x, y), client=client.tolist())
    assert data.transform.inputs == expected.transform.inputs
    assert torch.equal(data.train.x, expected.train.x)
    report = check(tmp_path / "wards.npz")
    assert report.fine
    assert "  input 'tokens': 3 integers" in "\n".join(lines(report))
    (written,) = export_clients(data, tmp_path / "out")
    again = coterie.load_clients(str(written))
    assert again.transform.inputs == data.transform.inputs
    assert torch.equal(again.train.x, data.train.x)
    assert torch.equal(again.test.y, data.test.y)
    np.savez(tmp_path / "both.npz", y=y, client=client, x=x["age"], **{"x.age": x["age"]})
    with pytest.raises(CoterieError, match="has the array 'x' and the inputs age"):
        coterie.load_clients(str(tmp_path / "both.npz"))
    with pytest.raises(CoterieError, match="input values is for samples that are one array"):
        coterie.load_clients(str(tmp_path / "wards.npz"), input="values")


GOOD, Y = ward()


def without(name: str) -> dict[str, Any]:
    return {key: values for key, values in GOOD.items() if key != name}


def broken() -> Any:
    ages = GOOD["age"].copy()
    ages[3] = np.nan
    return {"a": ({**GOOD, "age": ages}, Y)}


@pytest.mark.parametrize(
    ("given", "options", "says"),
    [
        ({"a": ({**GOOD, "age": GOOD["age"][1:]}, Y)}, {}, "inputs and labels have different .*: image 12, age 11"),
        ({"a": (GOOD, Y[1:])}, {}, "different lengths: .*the labels 11"),
        ({"a": ({**GOOD, "age": 3.0}, Y)}, {}, "one entry for each sample"),
        ({"a": (GOOD, Y), "b": (without("age"), Y)}, {}, "client b, sample 0: inputs image, mask, tokens; client a, "),
        (
            {"a": (GOOD, Y), "b": ({**GOOD, "age": GOOD["age"][:, None]}, Y)},
            {},
            r"client b, sample 0: input age \(1,\) float32; client a, sample 0 has age \(\) float32",
        ),
        ({"a": (GOOD, Y), "b": (GOOD["image"], Y)}, {}, "client b, sample 0: inputs none; client a"),
        (broken(), {}, "missing or infinite value; .*: client a, sample 3, input 'age'"),
        ({"a": ({**GOOD, "name": ["x"] * 12}, Y)}, {}, "client a, input 'name': values of type <U1; they must"),
        ({"a": ({1: GOOD["age"]}, Y)}, {}, "inputs need text as names, got 1"),
        ({"a": Samples({}, Y)}, {}, "client a: a dictionary without inputs"),
        ({"a": (GOOD, Y)}, {"input": {"ages": "values"}}, "unknown input 'ages': did you mean 'age'"),
        ({"a": (GOOD, Y)}, {"input": {"age": "number"}}, "unknown type of input 'age' 'number'"),
        ({"a": (GOOD, Y)}, {"input": "values"}, "name the types of inputs"),
        ({"a": (GOOD, Y)}, {"padding": 0}, "for several inputs a dictionary"),
        ({"a": (GOOD, Y)}, {"padding": {"token": 0}}, "unknown input to be padded 'token': did you mean 'tokens'"),
        ({"a": (GOOD, Y)}, {"padding": {"age": 0}}, "input 'age' has one value per sample"),
        ({"a": (GOOD, Y)}, {"normalise": "auto", "channel_axis": 0}, "name the input of this channel axis"),
        ({"a": (GOOD, Y)}, {"normalise": "auto", "channel_axis": {"imag": 0}}, "did you mean 'image'"),
        ({"a": (GOOD, Y)}, {"transform": Transform(crop=2)}, "`transform` is for samples that are one array"),
        ({"a": (GOOD["image"], Y)}, {"input": {"image": "image"}}, "`input` by name is for samples with several"),
        ({"a": (GOOD["image"], Y)}, {"normalise": "auto", "channel_axis": {"x": 0}}, "`channel_axis` by name is for"),
        ({"a": ({"ecg": [[1.0], [1.0, 2.0]]}, [0, 1])}, {}, r"sample 1, input 'ecg': shape \(2,\) differs .*padding="),
        ({"a": {**GOOD, "y": Y}}, {"sample_column": "image,y"}, "column 'y' cannot be an input: it is the label"),
        ({"a": {**GOOD, "y": Y}}, {"sample_column": "image,agee"}, "did you mean 'age'"),
        ({"a": {**GOOD, "y": Y[1:]}}, {"sample_column": "image,age"}, "columns have different lengths"),
    ],
)  # fmt: skip
def test_refused(given: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(CoterieError, match=says) as caught:
        coterie.clients_from(given, **options)
    assert "\n" not in str(caught.value)


def test_samples_that_differ_are_refused() -> None:
    class Odd(Samples):
        def __getitem__(self, i: int) -> Any:
            sample, y = super().__getitem__(i)
            return ({k: v for k, v in sample.items() if i < 2 or k != "age"} if i < 3 else 1.0), y

    with pytest.raises(CoterieError, match="some samples are dictionaries of inputs, others are not"):
        coterie.clients_from({"a": Odd(GOOD, Y)})
    with pytest.raises(CoterieError, match="client a, sample 2: inputs tokens, mask, image; the first sample has"):
        coterie.clients_from({"a": Odd(GOOD, Y[:3])})
