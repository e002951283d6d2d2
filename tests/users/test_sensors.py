"""A user with sensors: windows of several channels, overlapping recordings, integer readings."""

from __future__ import annotations

import json
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
from coterie.data import describe_input

CHANNELS, STEPS = 3, 40


def recordings(count: int = 12, steps: int = 400, seed: int = 0) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """(count, C, steps) signals whose frequency is their class; channels with means 100, 0 and -5."""
    draw = np.random.default_rng(seed)
    y = np.arange(count) % 2
    time = np.arange(steps) / STEPS * 2 * np.pi
    wave = np.sin(time * (1 + 3 * y[:, None]) + draw.uniform(0, 6, (count, 1)))
    x = wave[:, None] * np.array([30.0, 1.0, 0.01])[:, None] + np.array([100.0, 0.0, -5.0])[:, None]
    return (x + draw.normal(size=x.shape) * np.array([3, 0.1, 0.001])[:, None]).astype(np.float32), y


def windows(step: int = STEPS // 2) -> dict[str, np.ndarray[Any, Any]]:
    """Windows of the recordings, overlapping by half unless step says otherwise; four people."""
    signals, y = recordings()
    starts = range(0, signals.shape[2] - STEPS + 1, step)
    x = np.concatenate([[signal[:, s : s + STEPS] for s in starts] for signal in signals])
    number = np.repeat(np.arange(len(signals)), len(starts))
    return {"x": x, "y": y[number], "client": number // 3, "group": number}


class Conv(nn.Module):
    """Takes (C, T); an image with one channel more would fail."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(CHANNELS, 8, 9), nn.ReLU(), nn.AdaptiveMaxPool1d(1), nn.Flatten())
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


@pytest.mark.parametrize("turned", [False, True])
def test_series_keep_their_shape(tmp_path: Path, turned: bool) -> None:
    given = windows()
    x = given["x"].transpose(0, 2, 1) if turned else given["x"]
    np.savez(tmp_path / "a.npz", x=x, y=given["y"], client=given["client"])
    data = coterie.load_clients(str(tmp_path / "a.npz"))
    assert data.shape == x.shape[1:]
    whole = TensorDataset(torch.from_numpy(x.copy()), torch.from_numpy(given["y"]))
    assert coterie.clients_from(whole, client=given["client"]).shape == x.shape[1:]


@pytest.mark.parametrize("turned", [False, True])
def test_statistics_of_series_are_per_channel(turned: bool) -> None:
    given = windows()
    x = given["x"].transpose(0, 2, 1).copy() if turned else given["x"]
    whole = TensorDataset(torch.from_numpy(x), torch.from_numpy(given["y"]))
    with pytest.raises(CoterieError, match=r"--channel-axis.*Conv1d.*LSTM"):
        coterie.clients_from(whole, client=given["client"], normalise="auto")
    data = coterie.clients_from(whole, client=given["client"], normalise="auto", channel_axis=1 if turned else 0)
    own = data.train.x.double().movedim(2, 1) if turned else data.train.x.double()
    np.testing.assert_allclose(data.transform.mean, own.mean((0, 2)), rtol=1e-9)
    np.testing.assert_allclose(data.transform.std, own.std((0, 2), correction=0), rtol=1e-9)
    assert (len(data.transform.mean), data.transform.axis) == (CHANNELS, int(turned))


def test_a_convolution_over_time_learns_from_normalised_series(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **windows())
    data = coterie.load_clients(str(tmp_path / "a.npz"), normalise="auto", channel_axis=0)
    result = coterie.run("fedavg", data, Conv(), rounds=6, lr=0.1, out=tmp_path / "run")
    assert result.history.curve("pre")[-1][1] > 0.9
    told = json.loads((tmp_path / "run" / "config.json").read_text(encoding="utf-8"))["data"]
    assert told["transform"]["axis"] == 0
    assert told["input"] == describe_input(data)
    assert any("3 channels of axis 0" in line for line in told["input"])


@pytest.mark.long
def test_a_network_by_name_learns_from_series(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "own.npz", **windows())
    command = ["--dataset", str(tmp_path / "own.npz"), "--normalise", "auto", "--channel-axis", "0", "--json"]
    out = tmp_path / "run"
    main(["run", "fedavg", *command, "--model", "cnn1d", "--rounds", "6", "--lr", "0.05", "--out", str(out)])
    result = coterie.load_run(out)
    assert result.history.curve("pre")[-1][1] > 0.9
    x, y = coterie.load_clients(str(tmp_path / "own.npz")).test.client(1)
    assert (result.personal_model(1)(x).argmax(1) == y).float().mean() > 0.9  # raw samples
    with pytest.raises(SystemExit):
        main(["run", "fedavg", *command, "--model", "cnn", "--rounds", "1"])
    assert "model 'cnn' takes images C x H x W" in capsys.readouterr().err


def test_windows_of_one_recording_stay_on_one_side_of_every_split(tmp_path: Path) -> None:
    given = windows()
    np.savez(tmp_path / "a.npz", **given)
    data = coterie.load_clients(str(tmp_path / "a.npz"), validation=0.3)
    assert data.validation is not None
    where = {row.tobytes(): group for row, group in zip(given["x"], given["group"], strict=True)}
    sides = [{where[row.numpy().tobytes()] for row in split.x} for split in (data.train, data.test, data.validation)]
    assert all(sides)
    assert set().union(*sides) == set(range(12))
    assert sum(map(len, sides)) == 12
    wards = [TensorDataset(*(torch.from_numpy(given[k][given["client"] == i]) for k in "xy")) for i in range(4)]
    groups = [given["group"][given["client"] == i] for i in range(4)]
    again = coterie.clients_from(wards, group=groups)
    sides = [{where[row.numpy().tobytes()] for row in split.x} for split in (again.train, again.test)]
    assert not sides[0] & sides[1]


def checked(path: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(["data", "check", str(path), *more])
    return int(ended.value.code or 0), capsys.readouterr().out


def test_data_check_warns_of_overlapping_windows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = windows()
    without = {name: values for name, values in given.items() if name != "group"}
    np.savez(tmp_path / "overlap.npz", **without)
    code, text = checked(tmp_path / "overlap.npz", capsys)
    assert code == 0
    assert "test window that overlaps a training window" in text
    assert "--group-column" in text
    np.savez(tmp_path / "grouped.npz", **given)
    assert "overlaps" not in checked(tmp_path / "grouped.npz", capsys)[1]
    apart = windows(step=STEPS)
    np.savez(tmp_path / "apart.npz", **{name: apart[name] for name in ("x", "y", "client")})
    assert "overlaps" not in checked(tmp_path / "apart.npz", capsys)[1]


def test_data_check_warns_of_near_duplicates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(200, 8))
    again = np.repeat(x, 2, axis=0) + draw.normal(size=(400, 8)) * 1e-4
    y, client = np.arange(400) // 2 % 2, np.arange(400) // 100
    np.savez(tmp_path / "twice.npz", x=again, y=y, client=client)
    assert "nearly equals a training sample" in checked(tmp_path / "twice.npz", capsys)[1]
    np.savez(tmp_path / "once.npz", x=x, y=y[:200], client=client[:200])
    assert "nearly equals a training sample" not in checked(tmp_path / "once.npz", capsys)[1]


def test_integer_readings_are_tokens_unless_they_are_named_values(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    y = np.arange(80) % 2
    x = draw.integers(0, 200, (80, 6)) + 300 * y[:, None]
    np.savez(tmp_path / "a.npz", x=x, y=y, client=np.arange(80) // 20)
    tokens = coterie.load_clients(str(tmp_path / "a.npz"))
    assert tokens.train.x.dtype == torch.int64
    with pytest.raises(CoterieError, match="--input values"):
        coterie.run("fedavg", tokens, "mlp", rounds=1)
    with pytest.raises(CoterieError, match="tokens cannot be normalized"):
        coterie.load_clients(str(tmp_path / "a.npz"), normalise="auto")
    values = coterie.load_clients(str(tmp_path / "a.npz"), input="values", normalise="auto")
    assert values.train.x.dtype == torch.float32
    assert coterie.run("fedavg", values, "mlp", rounds=5, lr=0.1).history.curve("pre")[-1][1] > 0.9


def test_bytes_of_a_series_are_not_divided(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 256, (40, 3, 16), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(40) % 2, client=np.arange(40) // 10)
    data = coterie.load_clients(str(tmp_path / "a.npz"), input="series")
    assert (data.shape, data.train.x.dtype, data.train.x.max()) == ((3, 16), torch.float32, x.max())
    images = coterie.load_clients(str(tmp_path / "a.npz"), input="image")
    assert (images.shape, images.train.x.dtype) == ((1, 3, 16), torch.uint8)


@pytest.mark.parametrize(
    ("y", "task"),
    [
        (np.tri(5, dtype=np.int64)[np.arange(8) % 5], "multi-label"),
        (np.zeros((8, 4, 4), np.uint8), "segmentation"),
        (np.linspace(0, 1, 8), "regression"),
        (np.arange(24).reshape(8, 3), "regression"),
        (np.arange(8.0), "classification"),
    ],
)
def test_the_task_is_guessed_from_the_labels(tmp_path: Path, y: Any, task: str) -> None:
    x = np.random.default_rng(0).normal(size=(8, 3, 20)).astype(np.float32)
    np.savez(tmp_path / "a.npz", x=x, y=y, client=np.arange(8) // 4)
    assert coterie.load_clients(str(tmp_path / "a.npz")).task.name == task
    pairs = [list(zip(x[:4], y[:4], strict=True)), list(zip(x[4:], y[4:], strict=True))]
    assert coterie.clients_from(pairs).task.name == task
    with pytest.raises(
        CoterieError,
        match=r"labels of type|fit no task|is text|not a class|one class per sample|expected class indices",
    ):
        coterie.clients_from(pairs, task="classification" if task != "classification" else "segmentation")


def test_labels_that_fit_no_task_are_refused_with_what_was_seen(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(8, 3, 20)).astype(np.float32)
    np.savez(tmp_path / "a.npz", x=x, y=np.array([1j] * 8), client=np.arange(8) // 4)
    with pytest.raises(CoterieError, match=r"labels of type complex128, shape \(8,\)"):
        coterie.load_clients(str(tmp_path / "a.npz"))
    np.savez(tmp_path / "b.npz", x=x, y=np.zeros((8, 2, 2, 2)), client=np.arange(8) // 4)
    with pytest.raises(CoterieError, match=r"labels of shape \(2, 2, 2\) fit no task"):
        coterie.load_clients(str(tmp_path / "b.npz"))


@pytest.mark.parametrize(
    ("pairs", "seen"),
    [
        ([(np.zeros(3), [1, 0]), (np.zeros(3), [1])], r"labels of shape \(2,\) and of shape \(1,\)"),
        ([(np.zeros(3), "a"), (np.zeros(3), None)], "no label"),
        ([(np.zeros(3), object()), (np.zeros(3), object())], "label of type object"),
        ([([[1.0], [1.0, 2.0]], 0), (np.zeros(3), 1)], "lists of different lengths"),
        ([(np.array(["a", None], object), 0), (np.array(["a", None], object), 1)], "samples of type object"),
    ],
)
def test_odd_samples_and_labels_are_refused_in_words(pairs: Any, seen: str) -> None:
    with pytest.raises(CoterieError, match=seen):
        coterie.clients_from([pairs])


def test_new_clients_by_name(tmp_path: Path) -> None:
    given = windows()
    people = {f"s{20 + i}": i for i in range(4)}
    sets = {
        name: TensorDataset(*(torch.from_numpy(given[k][given["client"] == i]) for k in "xy"))
        for name, i in people.items()
    }
    data = coterie.clients_from(sets, normalise="auto", channel_axis=0)
    assert data.client_names == ("s20", "s21", "s22", "s23")
    coterie.run("fedavg", data, Conv(), rounds=1, new_clients="s22,s20", out=tmp_path / "run")
    told = json.loads((tmp_path / "run" / "config.json").read_text(encoding="utf-8"))
    assert told["data"]["client_names"] == ["s21", "s23"]
    assert told["federation"]["new_clients"] == "s22,s20"
    with pytest.raises(CoterieError, match="unknown client 's29': did you mean 's2"):
        coterie.run("fedavg", data, Conv(), rounds=1, new_clients="s29")
