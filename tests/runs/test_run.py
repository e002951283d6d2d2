"""The folder of a run is enough to use every client's model."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

import coterie
from coterie.core.errors import CoterieError
from coterie.methods import METHODS
from coterie.runs.finding import load_run
from coterie.runs.run import Run
from tests import toy
from tests.personal.conftest import NETWORK, Made
from tests.signing import sign


@pytest.mark.parametrize("name", METHODS)
def test_models_come_back(name: str, made: Made) -> None:
    run, result = made(name)
    for client, size in enumerate(toy.TEST_SIZES):
        x, _ = result.data.test.client(client)
        model = run.personal_model(client)
        assert isinstance(model, nn.Module)
        assert model(x).shape == (size, toy.CLASSES)
        torch.testing.assert_close(model(x), result.personal_model(client)(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["fedavg", "fedrep"])
def test_history_comes_back(name: str, made: Made) -> None:
    run, result = made(name)
    assert len(run.history) == len(result.history)
    for read, was in zip(run.history, result.history, strict=True):
        assert (read.number, read.bytes_up, read.bytes_down) == (was.number, was.bytes_up, was.bytes_down)
        assert read.participants.tolist() == was.participants.tolist()
        assert read.scores.keys() == was.scores.keys()
        for point, scores in was.scores.items():
            assert toy.rows(read.scores[point])[:3] == toy.rows(scores)[:3]
            assert read.scores[point].loss.tolist() == pytest.approx(scores.loss.tolist(), abs=1e-5)


def test_who_has_a_model(made: Made) -> None:
    run, result = made("fedavg")
    counts = result.data.train.class_counts(toy.CLASSES)
    assert [c.samples for c in run.clients] == list(toy.TRAIN_SIZES)
    assert [c.classes for c in run.clients] == [int((row > 0).sum()) for row in counts]
    finished = result.history[-1].scores["finished", "test"]
    assert [c.score for c in run.clients] == pytest.approx(finished.value.tolist())
    assert [c.size for c in run.clients] == [c.file.stat().st_size for c in run.clients]


def test_a_client_that_is_not_there(made: Made) -> None:
    run, _ = made("fedavg")
    for client in (-1, 5):
        with pytest.raises(CoterieError, match=f"no client {client}; clients are 0 to 4"):
            run.personal_model(client)


def copy(run: Run, to: Path) -> Path:
    return Path(shutil.copytree(run.path, to))


def test_an_unfinished_run_says_so(made: Made, tmp_path: Path) -> None:
    path = copy(made("fedavg")[0], tmp_path / "run")
    (path / "result.json").unlink()
    with pytest.raises(CoterieError, match=r"not finished, it has 2 of 2 rounds.*coterie resume"):
        load_run(path)


def test_not_a_run(tmp_path: Path, made: Made) -> None:
    with pytest.raises(CoterieError, match="no such folder"):
        load_run(tmp_path / "nothing")
    with pytest.raises(CoterieError, match="is not a run folder"):
        load_run(tmp_path)
    copy(made("fedavg")[0], tmp_path / "fedavg-seed0")
    with pytest.raises(CoterieError, match=r"several runs.*fedavg-seed0"):
        load_run(tmp_path)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", b"{"),
        ("config.json", b"[]"),
        ("config.json", b'{"method": {"name": "FedAvg", "train": {}}}'),
        ("config.json", b'{"method": {"name": "FedAvg", "train": {}}, "network": {"name": 3, "head": null}}'),
        ("models/client-1.safetensors", b""),
        ("models/client-1.safetensors", b"\xff" * 100),
        ("models/client-1.safetensors", None),
        ("models/start.safetensors", None),
        ("models/server.safetensors", b"\x00" * 8),
        ("models/models.sha256", None),
        ("models/models.sha256", b"\xff\xfe"),
        ("classes.csv", b"client,0,1\n"),
        ("clients.csv", b"round,client\nx,y\n"),
    ],
)
def test_damaged_files_are_named(file: str, content: bytes | None, made: Made, tmp_path: Path) -> None:
    path = copy(made("fedavg")[0], tmp_path / "run")
    (path / file).unlink() if content is None else (path / file).write_bytes(content)
    sign(path)  # also what has the right checksum may be damaged
    with pytest.raises(CoterieError, match=file):  # noqa: PT012
        run = load_run(path, NETWORK)
        run.personal_model(1)
        assert run.clients
        assert run.server


def test_a_cut_file_is_refused(made: Made, tmp_path: Path) -> None:
    path = copy(made("fedrep")[0], tmp_path / "run")
    file = path / "models" / "client-0.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(CoterieError, match="client-0"):
        load_run(path, NETWORK).personal_model(0)


def test_models_of_another_method_are_refused(made: Made, tmp_path: Path) -> None:
    path = copy(made("fedrep")[0], tmp_path / "run")
    shutil.copy(made("ditto")[0].path / "models" / "client-0.safetensors", path / "models")
    with pytest.raises(CoterieError, match=r"client-0.*checksum"):
        load_run(path, NETWORK).personal_model(0)
    subprocess.run("sha256sum *.safetensors > models.sha256", shell=True, cwd=path / "models", check=True)
    sign(path)
    with pytest.raises(CoterieError, match=r"client-0.*expected|client-0.*missing"):
        load_run(path, NETWORK).personal_model(0)


def test_models_can_be_checked_with_sha256sum(made: Made, tmp_path: Path) -> None:
    """Every file is in the list, a bit that flips is found there and here, by the name of the file."""
    path = copy(made("fedrep")[0], tmp_path / "run")
    models = path / "models"

    def check() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sha256sum", "--check", "--strict", "models.sha256"],
            capture_output=True, text=True, cwd=models, env={"LC_ALL": "C"}, check=False,
        )  # fmt: skip

    good = check()
    assert good.returncode == 0, good.stderr
    named = [line.removesuffix(": OK") for line in good.stdout.splitlines()]
    assert sorted([*named, "models.sha256"]) == sorted(p.name for p in models.iterdir())
    file = models / "client-3.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1  # the last bit of a weight: a file that can be read as well as before
    file.write_bytes(content)
    bad = check()
    assert bad.returncode != 0
    assert [line for line in bad.stdout.splitlines() if "FAILED" in line] == ["client-3.safetensors: FAILED"]
    run = load_run(path, NETWORK)
    run.personal_model(2)
    with pytest.raises(CoterieError, match=r"models/client-3\.safetensors.*checksum"):
        run.personal_model(3)


def test_a_network_without_a_name_must_be_given(tmp_path: Path) -> None:
    data = toy.toy()
    result = coterie.run(
        toy.method("fedbabu"), data, toy.network(seed=4), rounds=1, backend="looped", out=tmp_path / "r"
    )
    run = coterie.load_run(tmp_path / "r")
    assert len(run.clients) == 5  # listing them needs no network
    with pytest.raises(CoterieError, match=r"Python object.*model=network.*package\.module:Class"):
        run.personal_model(0)
    x, _ = data.test.client(0)
    again = coterie.load_run(tmp_path / "r", model=toy.network(seed=9)).personal_model(0)  # other weights: not used
    torch.testing.assert_close(again(x), result.personal_model(0)(x), rtol=0, atol=1e-6)
    with pytest.raises(CoterieError, match="other weights than the one that was trained"):
        coterie.load_run(tmp_path / "r", model=toy.network(batch_norm=True)).personal_model(0)


def test_a_setting_that_no_longer_exists(made: Made, tmp_path: Path) -> None:
    path = copy(made("ditto")[0], tmp_path / "run")
    config = json.loads((path / "config.json").read_text())
    config["method"]["pulling"] = config["method"].pop("pull")
    (path / "config.json").write_text(json.dumps(config))
    sign(path)
    with pytest.raises(CoterieError, match=r"other settings now.*pull, pulling"):
        load_run(path, NETWORK).personal_model(0)
