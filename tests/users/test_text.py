"""A user with text: token numbers that a tokenizer made, an embedding network, no images anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import coterie
from coterie.cli import main
from coterie.core.errors import CoterieError

WORDS, LENGTH = 200, 12


def sentences(kind: Any = np.int64) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Of the positive class half of the words are below 100, of the other above; three authors."""
    draw = np.random.default_rng(0)
    y = np.arange(120) % 2
    words = draw.integers(0, 100, (120, LENGTH)) + 100 * (draw.random((120, LENGTH)) < 0.2 + 0.6 * y[:, None])
    return words.astype(kind), y, np.arange(120) // 40


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.embed(x).mean(1))
        return out


@pytest.mark.parametrize("form", ["npz", "clients_from"])
@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.int32])
def test_tokens_reach_an_embedding_and_are_learned_from(tmp_path: Path, form: str, kind: Any) -> None:
    x, y, author = sentences(kind)
    if form == "npz":
        np.savez(tmp_path / "a.npz", x=x, y=y, client=author)
        data = coterie.load_clients(str(tmp_path / "a.npz"))
    else:
        data = coterie.clients_from(TensorDataset(torch.from_numpy(x), torch.from_numpy(y)), client=author)
    assert (data.shape, data.train.x.dtype) == ((LENGTH,), torch.int64)
    assert int(data.train.x.max()) > 100  # not divided by 255
    assert data.transform.mean == ()
    torch.manual_seed(0)
    result = coterie.run("fedavg", data, Words(), rounds=10, lr=1.0, momentum=0.9)
    assert result.history.curve("pre")[-1][1] > 0.8
    told = result.personal_model(0)(data.test.client(0)[0])
    assert (told.argmax(1) == data.test.client(0)[1]).float().mean() > 0.7


@pytest.mark.long
def test_a_network_by_name_learns_from_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x, y, author = sentences()
    np.savez(tmp_path / "own.npz", x=x, y=y, client=author)
    command = ["run", "fedavg", "--dataset", str(tmp_path / "own.npz"), "--model", "transformer", "--json"]
    out = tmp_path / "run"
    options = ["--model-args", f"vocabulary={WORDS}", "depth=1", "--rounds", "8", "--lr", "0.05", "--out", str(out)]
    main([*command, *options])
    result = coterie.load_run(out)
    assert result.history.curve("pre")[-1][1] > 0.8
    x, y = coterie.load_clients(str(tmp_path / "own.npz")).test.client(0)
    assert (result.personal_model(0)(x).argmax(1) == y).float().mean() > 0.7
    for wrong, message in (
        ([], "tokens (time,) with --model-args vocabulary=N, got samples of shape (12,)"),
        (["--model-args", "vocabulary=100"], "vocabulary=100 allows tokens from 0 to 99, but the data has tokens from"),
    ):
        with pytest.raises(SystemExit):
            main([*command, *wrong, "--rounds", "1"])
        assert message in capsys.readouterr().err


def test_tokens_train_alike_looped_and_stacked() -> None:
    x, y, author = sentences(np.uint8)
    data = coterie.clients_from(TensorDataset(torch.from_numpy(x), torch.from_numpy(y)), client=author)
    torch.manual_seed(0)
    network = Words()
    results = [coterie.run("fedper", data, network, rounds=2, backend=where) for where in ("looped", "stacked")]
    logits = [result.personal_model(1)(data.test.client(1)[0]) for result in results]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5)


def test_a_table_of_tokens(tmp_path: Path) -> None:
    x, y, author = sentences()
    names = [f"t{i}" for i in range(LENGTH)]
    rows = [",".join([*names, "label", "author"])]
    rows += [",".join(map(str, [*row, label, own])) for row, label, own in zip(x, y, author, strict=True)]
    (tmp_path / "a.csv").write_text("\n".join(rows), encoding="utf-8")
    named = {"client_column": "author", "input": "tokens"}
    data = coterie.load_clients(str(tmp_path / "a.csv"), **named)
    assert (data.train.x.dtype, data.shape) == (torch.int64, (LENGTH,))
    assert [column.name for column in data.transform.columns] == names
    coterie.run("local", data, Words(), rounds=1)


def test_fractions_are_no_tokens(tmp_path: Path) -> None:
    x, y, author = sentences()
    np.savez(tmp_path / "a.npz", x=x + 0.5, y=y, client=author)
    with pytest.raises(CoterieError, match="--input tokens takes whole numbers"):
        coterie.load_clients(str(tmp_path / "a.npz"), input="tokens")
    np.savez(tmp_path / "b.npz", x=x.astype(np.float64), y=y, client=author)
    assert coterie.load_clients(str(tmp_path / "b.npz"), input="tokens").train.x.dtype == torch.int64


def test_sentences_that_are_not_tokenized_are_refused(tmp_path: Path) -> None:
    rows = ["text,label,user", *(f"review number {i},{i % 2},{i % 3}" for i in range(40))]
    (tmp_path / "a.csv").write_text("\n".join(rows), encoding="utf-8")
    with pytest.raises(CoterieError, match=r"column 'text': 40 different texts in 40 rows.*review number 0"):
        coterie.load_clients(str(tmp_path / "a.csv"))


def test_lists_of_tokens_in_a_hugging_face_dataset(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    x, y, author = sentences()
    whole = datasets.Dataset.from_dict({"input_ids": x.tolist(), "label": y.tolist(), "user": author.tolist()})
    whole.save_to_disk(str(tmp_path / "d"))
    data = coterie.load_clients(str(tmp_path / "d"))
    assert (data.train.x.dtype, data.shape) == (torch.int64, (LENGTH,))
    assert sorted(map(tuple, torch.cat([data.train.x, data.test.x]).tolist())) == sorted(map(tuple, x.tolist()))
