"""A run that was opened from its folder is used like the result of `coterie.run`; the data are not needed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import coterie
from coterie.api.saved_run import Run, load_run
from coterie.core.errors import CoterieError
from coterie.methods import METHODS
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
    assert [c.samples for c in run.members] == list(toy.TRAIN_SIZES)
    assert [c.classes for c in run.members] == [int((row > 0).sum()) for row in counts]
    finished = result.history[-1].scores["finished", "test"]
    assert [c.score for c in run.members] == pytest.approx(finished.value.tolist())
    assert [c.size for c in run.members] == [c.file.stat().st_size for c in run.members]


def test_a_client_that_is_not_there(made: Made) -> None:
    run, _ = made("fedavg")
    for client in (-1, 5):
        with pytest.raises(CoterieError, match=f"no client {client}; clients are 0 to 4"):
            run.personal_model(client)


def copy(run: Run, to: Path) -> Path:
    return Path(shutil.copytree(run.folder, to))


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
        assert run.members
        assert run.server


def test_a_cut_file_is_refused(made: Made, tmp_path: Path) -> None:
    path = copy(made("fedrep")[0], tmp_path / "run")
    file = path / "models" / "client-0.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(CoterieError, match="client-0"):
        load_run(path, NETWORK).personal_model(0)


def test_models_of_another_method_are_refused(made: Made, tmp_path: Path) -> None:
    path = copy(made("fedrep")[0], tmp_path / "run")
    shutil.copy(made("ditto")[0].folder / "models" / "client-0.safetensors", path / "models")
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
    assert len(run.members) == 5  # listing them needs no network
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


def used(run: coterie.Result | coterie.Run, place: Path) -> dict[str, Any]:
    """What one script of a user gets from a run."""
    from matplotlib import pyplot

    ax = run.plot(pyplot.figure().subplots())
    lines = {str(line.get_label()): np.asarray(line.get_xydata()).tolist() for line in ax.get_lines()}
    saved = coterie.load_run(run.save(place / "saved"), NETWORK)
    return {
        "scores": run.scores,
        "metrics": run.metrics,
        "clients": run.clients,
        "means": {o.name: (o.point, o.last.mean, o.last.worst10, o.best_on_test) for o in run.outcomes()},
        "rounds": [(record.number, record.bytes_up) for record in run.history],
        "about": (run.method, run.title, run.metric, list(run.client_ids), run.folder, run.privacy),
        "output": run.personal_model("3")(toy.toy().test.client(3)[0]).tolist(),
        "plot": (lines, ax.get_title()),
        "report": run.report(place / "report.html").read_text(encoding="utf-8"),
        "saved": (saved.scores, saved.clients, saved.history[-1].number),
        "text": repr(run).splitlines()[1:],
        "html": run._repr_html_().partition("</p>")[2],
    }


@pytest.mark.parametrize("name", ["fedavg", "ditto"])
def test_one_script_for_results_and_opened_runs(name: str, made: Made, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("matplotlib").use("Agg")
    run, result = made(name)
    assert run.folder == result.folder
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    read, was = used(run, tmp_path / "a"), used(result, tmp_path / "b")
    assert read.keys() == was.keys()
    for what in read:
        for ours, theirs in zip(*(v if type(v) is tuple else (v,) for v in (read[what], was[what])), strict=True):
            if isinstance(theirs, pandas.DataFrame):
                assert len(theirs)
                pandas.testing.assert_frame_equal(ours, theirs, rtol=1e-5, atol=1e-6, check_dtype=False)
            else:
                assert ours == theirs, what


def test_a_regression_with_named_clients_reads_back(tmp_path: Path) -> None:
    """Metrics that are no shares, undefined values, names and validation samples."""
    pandas = pytest.importorskip("pandas")
    rng = np.random.default_rng(0)
    parts = {f"plant-{i}": (rng.normal(size=(20 + i, 3)), rng.normal(size=20 + i)) for i in range(3)}
    data = coterie.clients_from(parts, task="regression", validation=0.3)
    result = coterie.run("fedper", data, "mlp", rounds=2, backend="looped", progress=False, out=tmp_path / "run")
    run = coterie.load_run(tmp_path / "run")
    for table in ("scores", "metrics", "clients"):
        pandas.testing.assert_frame_equal(getattr(run, table), getattr(result, table), rtol=1e-5, check_dtype=False)
    assert run.clients["name"].tolist() == list(parts)
    assert "rmse" in run.clients
    assert "validation_pre" in run.scores


def test_tables_without_pandas_are_lists(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    run, result = made("fedavg")
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert run.metrics == result.metrics
    assert run.scores == result.scores
    assert [list(row) for row in run.clients] == [list(row) for row in result.clients]


def test_saving_copies_everything_or_nothing(made: Made, tmp_path: Path) -> None:
    first = copy(made("fedrep")[0], tmp_path / "run")
    run = load_run(first, NETWORK)
    saved = run.save(tmp_path / "archive" / "copy")
    names = sorted(p.relative_to(first) for p in first.rglob("*"))
    assert sorted(p.relative_to(saved) for p in saved.rglob("*")) == names
    assert all((saved / name).read_bytes() == (first / name).read_bytes() for name in names if (first / name).is_file())
    with pytest.raises(CoterieError, match="exists already"):
        run.save(saved)
    with pytest.raises(CoterieError, match="inside the run's own folder"):
        run.save(first / "again")
    model = first / "models" / "client-2.safetensors"
    model.write_bytes(model.read_bytes()[:-1] + b"\x01")
    with pytest.raises(CoterieError, match=r"client-2.*checksum"):
        run.save(tmp_path / "other")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["archive", "run"]


def test_tables_of_an_opened_run_need_no_code_of_the_user(tmp_path: Path) -> None:
    coterie.run(toy.method("fedper"), toy.toy(), toy.network(), rounds=1, backend="looped", out=tmp_path / "r")
    run = coterie.load_run(tmp_path / "r")  # the network is not given
    assert len(run.clients) == 5
    assert "FedPer on toy, 5 clients, 1 round" in repr(run)
    assert run.report(tmp_path / "report.html").exists()
