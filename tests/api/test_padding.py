"""Texts of different lengths: padding has no influence on outputs, in training, prediction and exports."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import coterie
from coterie.core.errors import CoterieError
from coterie.models import build
from coterie.personal.export import export

WORDS = 10  # 0 is padding
ARGS: dict[str, dict[str, Any]] = {"lstm": {"hidden": 8}, "transformer": {"depth": 1}}


def texts(longest: int, seed: int = 0) -> list[tuple[np.ndarray, int]]:
    """The class is said by the last word."""
    draw = np.random.default_rng(seed)
    made = [draw.integers(1, WORDS, longest if i == 0 else draw.integers(2, 6)) for i in range(24)]
    return [(words, int(words[-1] > 5)) for words in made]


def data() -> coterie.FederatedData:
    return coterie.clients_from([texts(7), texts(7, 1)], padding=0)


@pytest.mark.parametrize("name", ARGS)
def test_the_length_of_padding_changes_nothing(name: str) -> None:
    short, long = (build(name, (t,), 3, 0, vocabulary=WORDS, padding=0, **ARGS[name]) for t in (5, 9))
    plain = build(name, (3,), 3, 0, vocabulary=WORDS, **ARGS[name])
    weights = long.state_dict()
    for network, steps in ((short, 5), (plain, 3)):
        network.load_state_dict({n: t[:steps] if len(t) == 9 else t for n, t in weights.items()})
    words = torch.tensor([[3, 4, 5], [7, 1, 2]])
    expected = plain(words)
    for network, more in ((short, 2), (long, 6)):
        padded = nn.functional.pad(words, (0, more))
        assert torch.allclose(network(padded), expected, atol=1e-6)
    mixed = torch.tensor([[3, 4, 5, 0, 0], [7, 1, 2, 8, 9], [0, 0, 0, 0, 0]])
    assert torch.allclose(short(mixed)[0], expected[0], atol=1e-6)
    assert short(mixed).isfinite().all()


@pytest.mark.parametrize("name", ARGS)
def test_later_padding_is_not_seen_by_tokens_before_it(name: str) -> None:
    network = build(name, (6,), WORDS, 0, vocabulary=WORDS, padding=0, per_token=True, **ARGS[name])
    words = torch.tensor([[3, 4, 5, 0, 0, 0], [3, 4, 5, 7, 8, 9]])
    assert torch.allclose(*network(words)[:, :3], atol=1e-6)


@pytest.mark.long
def test_predictions_and_exports_know_padding(tmp_path: Path) -> None:
    args = {"vocabulary": WORDS, "depth": 1}
    coterie.run("fedper", data(), "transformer", model_args=args, rounds=1, progress=False, out=tmp_path / "run")
    run = coterie.load_run(tmp_path / "run")
    model = run.personal_model(0)
    words = torch.tensor([[3, 4, 5]])
    padded = nn.functional.pad(words, (0, 4))
    assert torch.equal(model(words), model(padded))
    assert torch.allclose(model([[3, 4, 5], [1, 2]])[:1], model(words), atol=1e-6)
    (made,) = export(run, 0, "torch", tmp_path / "model.pt2")
    assert torch.allclose(torch.export.load(made).module()(padded), model(words), atol=1e-6)
    onnx, script = export(run, 0, "onnx", tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(onnx)
    assert np.allclose(session.run(None, {"samples": padded.numpy()})[0], model(words).detach(), atol=1e-5)
    np.save(tmp_path / "short.npy", words.numpy())
    said = subprocess.run([sys.executable, script, tmp_path / "short.npy"], capture_output=True, text=True, check=True)
    assert float(said.stdout.split()[1]) == pytest.approx(float(model.read(words).detach().max()), abs=1e-3)


def test_prediction_of_tokens_has_an_output_for_each_given_one() -> None:
    pairs = [(words[:-1], words[1:]) for words, _ in texts(7)]
    made = coterie.clients_from([pairs, pairs], padding=0)
    result = coterie.run("fedavg", made, "lstm", model_args={"hidden": 8}, rounds=1, progress=False)
    assert result.personal_model(0)(torch.tensor([[3, 4, 5]])).shape == (1, 3, WORDS)


@pytest.mark.parametrize("words", [[3, 0, 5], [3, 5, 0]])
def test_the_padding_id_is_no_word(words: list[int]) -> None:
    used = [*texts(7), (np.array(words), 1)]
    with pytest.raises(CoterieError, match=r"sequence of 3 tokens has the padding id 0 at position [12]"):
        coterie.clients_from([used, used], padding=0)


def test_padded_texts_of_one_length_are_taken() -> None:
    filled = [(np.pad(words, (0, 7 - len(words))), y) for words, y in texts(7)]
    made = coterie.clients_from([filled, filled], padding=0)
    assert torch.equal(made.train.x, coterie.clients_from([texts(7), texts(7)], padding=0).train.x)
    assert made.transform.padding == 0
    assert coterie.clients_from([filled, filled]).transform.padding is None


def test_inputs_by_name_are_padded_in_prediction() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(WORDS, 4), nn.Linear(4, 2)

        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            return self.head((self.embed(ids) * mask[..., None]).sum(1))  # type: ignore[no-any-return]

    ids = [words for words, _ in texts(7)]
    client = ({"ids": ids, "mask": [np.ones_like(words) for words in ids]}, [y for _, y in texts(7)])
    made = coterie.clients_from([client, copy.deepcopy(client)], padding={"ids": 0, "mask": 0})
    model = coterie.run("fedavg", made, Masked(), rounds=1, progress=False).personal_model(0)
    short = {"ids": torch.tensor([[3, 4]]), "mask": torch.ones(1, 2, dtype=torch.int64)}
    assert torch.equal(model(short), model({name: nn.functional.pad(x, (0, 5)) for name, x in short.items()}))


@pytest.mark.parametrize("options", [{"padding": 10, "vocabulary": 10}, {"padding": 0}])
def test_padding_that_is_no_token_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(CoterieError, match="padding of model 'lstm'"):
        build("lstm", (5,), 2, 0, **options)
