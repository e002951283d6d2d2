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
from coterie.models import build, make_network
from coterie.personal.export import export
from tests import toy

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


SERIES = 3  # features


def series(longest: int, count: int = 24, seed: int = 0, far: float = 5.0) -> list[tuple[np.ndarray, int]]:
    """The class is said by the last step."""
    draw = np.random.default_rng(seed)
    lengths = [longest, *draw.integers(2, 6, count - 1)]
    made = [(far + draw.normal(size=(length, SERIES))).astype(np.float32) for length in lengths]
    return [(steps, int(steps[-1, 0] > far)) for steps in made]


@pytest.mark.parametrize("name", ARGS)
@pytest.mark.parametrize("padding", [0.0, -7.0])
def test_padded_series_have_the_outputs_of_those_that_are_not(name: str, padding: float) -> None:
    args = {"depth": 1} if name == "transformer" else {"hidden": 8}
    padded, plain = (build(name, (t, SERIES), 3, 0, **more, **args) for t, more in ((9, {"padding": padding}), (4, {})))
    weights = zip(plain.state_dict(), padded.state_dict().values(), strict=True)
    plain.load_state_dict({own: t[:4] if len(t) == 9 else t for own, t in weights})
    x = torch.randn(2, 4, SERIES)
    x[0, 1] = padding  # before the end it is a step as any other
    more = torch.cat([x, torch.full((2, 5, SERIES), padding)], 1)
    assert torch.allclose(padded(more), plain(x), atol=1e-6)


def federation(longest: int) -> coterie.FederatedData:
    """Two clients, of which one has a test series of this length that is hardly different from padding."""
    steps = np.concatenate([series(6)[0][0], np.zeros((longest - 6, SERIES), np.float32)])
    steps[-1, 0] = 1e-6
    train, test = [series(6, seed=1), series(6, seed=2)], [series(6, seed=3), [*series(6, seed=4), (steps, 0)]]
    return coterie.clients_from(train, test, padding=0.0, normalise="auto", channel_axis=1)


def test_the_longest_series_does_not_change_the_others() -> None:
    """Nor does padding change how series are standardized."""
    outputs = []
    for longest in (7, 30):
        data = federation(longest)
        values = np.concatenate([x for seed in (1, 2) for x, _ in series(6, seed=seed)])
        assert np.allclose(data.transform.mean, values.mean(0), atol=1e-5)
        assert np.allclose(data.transform.std, values.std(0), atol=1e-5)
        result = coterie.run("fedavg", data, "lstm", model_args={"hidden": 8}, rounds=1, progress=False)
        x, _ = data.test.client(0)
        assert x.shape[1] == longest
        outputs.append(result.personal_model(0)(x))
    assert torch.allclose(*outputs, atol=1e-6)


def test_padded_series_are_the_same_looped_and_stacked() -> None:
    data = federation(9)
    model = make_network("transformer", data, 0, model_args={"depth": 1}).to("cpu", torch.float64)
    assert model.trimming.training
    (looped, _), (stacked, _) = (run(toy.method("fedper"), model, data) for run in (toy.looped, toy.stacked))
    assert toy.distance(looped, stacked) < 1e-10


def test_padding_of_series_is_refused_where_it_could_be_a_value() -> None:
    ends = series(7)
    ends[3][0][-1] = 0.0
    with pytest.raises(CoterieError, match=r"series of \d steps ends with the padding 0\.0; choose a number"):
        coterie.clients_from([ends, series(7)], padding=0.0)
    coterie.clients_from([ends, series(7)], padding=-1.0)


def test_series_of_different_lengths_are_padded_or_refused() -> None:
    with pytest.raises(CoterieError, match=r"sample 1: shape .* differs .*; series .* need padding=NUMBER"):
        coterie.clients_from([series(7), series(7)])
    turned = [(x.T, y) for x, y in series(7)]
    with pytest.raises(CoterieError, match=r"along time, their first axis, .* turn series \(C, T\) around: x\.T"):
        coterie.clients_from([turned, turned], padding=0.0)


def test_lists_of_series_and_labels_are_taken() -> None:
    pairs = [series(7), series(6, seed=1)]
    expected = coterie.clients_from(pairs, padding=0.0)
    listed = [([x for x, _ in own], [y for _, y in own]) for own in pairs]
    array = np.empty(24, object)
    array[:] = listed[1][0]
    for given in (listed, [listed[0], (array, np.array(listed[1][1]))]):
        made = coterie.clients_from(given, padding=0.0)
        assert torch.equal(made.train.x, expected.train.x)
        assert torch.equal(made.train.y, expected.train.y)
    with pytest.raises(CoterieError, match="different lengths: the samples 24, the labels 23"):
        coterie.clients_from([(listed[0][0], listed[0][1][1:]), listed[1]], padding=0.0)


def test_a_network_that_would_take_time_for_channels_is_refused() -> None:
    with pytest.raises(CoterieError, match=r"'cnn1d' takes series \(C, T\), and padded series are \(T, F\)"):
        coterie.run("fedavg", federation(9), "cnn1d", rounds=1, progress=False)
