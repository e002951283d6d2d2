"""What trackers have of a run, by their own readers; and that nothing leaves the machine. Real processes."""

from __future__ import annotations

import csv
import errno
import io
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import coterie
from coterie.core.errors import CoterieError
from coterie.runs.trackers import TRACKERS
from coterie.runs.trackers.tensorboard import TensorBoard
from tests import toy
from tests.runs.offline_log import records
from tests.runs.test_resume import end, rounds, until

pytestmark = pytest.mark.network
RUN = [
    "run", "fedavg", "-nc", "6", "--local-size", "30", "--test-size", "20", "--model", "linear", "-jr", "0.5",
    "--rounds", "40", "--validation", "0.2", "--new-clients", "0.34", "--processes", "1", "--evaluate-every", "2",
    "--full-last-round", "--track", "tensorboard,wandb,mlflow",
]  # fmt: skip

GUARD = """
import os, socket
plain = socket.socket.connect
def connect(self, address):
    if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1", "localhost"):
        open(os.environ["GUARD"] + "/called", "a").write(repr(address))
        raise OSError("nothing may be called")
    return plain(self, address)
socket.socket.connect = connect
open(os.environ["GUARD"] + "/guarded", "w").close()
"""
Curves = dict[str, dict[int, float]]  # name -> step -> value


class Guarded:
    """Processes of which none may call anybody: not by Python, and not by a proxy that all others would use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "sitecustomize.py").write_text(GUARD)
        self.proxy = socket.create_server(("127.0.0.1", 0))
        self.proxy.setblocking(False)

    def begin(self, *arguments: str | Path) -> subprocess.Popen[str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "WANDB", "MLFLOW", "CI", "GITHUB"))}
        proxy = f"http://127.0.0.1:{self.proxy.getsockname()[1]}"
        proxies = {f"{kind}_PROXY": proxy for kind in ("HTTP", "HTTPS", "ALL")}
        path = os.pathsep.join([str(self.folder), os.environ.get("PYTHONPATH", "")])
        own = {"GUARD": str(self.folder), "HOME": str(self.folder), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, "-m", "coterie", *map(str, arguments)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            env=kept | proxies | {k.lower(): v for k, v in proxies.items()} | own,
        )  # fmt: skip

    def called(self) -> bool:
        try:
            self.proxy.accept()[0].close()
        except BlockingIOError:
            return (self.folder / "called").exists()
        return True


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    made = Guarded(tmp_path_factory.mktemp("guard"))
    yield made
    made.proxy.close()


@pytest.fixture(scope="module")
def run(guarded: Guarded) -> Path:
    """Stopped after some rounds, resumed, killed, resumed, ended."""
    out = guarded.folder / "run"
    process = guarded.begin(*RUN, "--out", out)
    until(lambda: rounds(out) >= 5, process)
    process.terminate()
    assert end(process)[0] == 128 + signal.SIGTERM
    stopped = rounds(out)
    process = guarded.begin("resume", out)
    until(lambda: rounds(out) >= stopped + 4, process)
    process.kill()
    end(process)
    code, errors = end(guarded.begin("resume", out))
    assert code == 0, errors
    assert "failed" not in (out / "log.txt").read_text()
    return out


def column(name: str) -> str:
    """Of metrics.csv, for the name that trackers have."""
    where, _, what = name.partition("/")
    if where in ("bytes", "seconds"):
        return f"{where}_{what}"
    if where == "clients":
        return what
    measure = {"accuracy": "mean", "loss": "loss"}.get(what) or what.removeprefix("accuracy_")
    return f"{where}_{measure}"


def assert_as_written(curves: Curves, run: Path, clock: bool, lost: range = range(0)) -> None:
    """Every cell of metrics.csv is there, and nothing else.

    clock: seconds are those of the file too. lost: rounds of which there may be something, all or nothing.
    """
    with (run / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    expected: dict[str, dict[int, float]] = {}
    for row in rows:
        for name, text in row.items():
            if name == "left_out":
                text = str(len(text.split()))
            if text and name != "round":
                expected.setdefault(name, {}).setdefault(int(row["round"]), float(text))
    found = {column(name): curve for name, curve in curves.items() if not name.startswith("outcome/")}
    assert found.keys() == expected.keys()
    for name, curve in found.items():
        may_lack = {number for number in lost if number in expected[name] and number not in curve}
        assert {*curve, *may_lack} == set(expected[name]), name
        if clock or not name.startswith("seconds"):
            written = {number: expected[name][number] for number in curve}
            assert curve == pytest.approx(written, rel=1e-5, abs=6e-5 if "seconds" in name else 1e-6), name


def assert_outcome(last: dict[str, float], run: Path) -> None:
    told = json.loads((run / "result.json").read_text())
    for outcome in told["outcomes"]:
        name = outcome["name"]
        assert last[f"outcome/{name}/accuracy"] == pytest.approx(outcome["last"]["mean"])
        assert last[f"outcome/{name}/accuracy_worst10"] == pytest.approx(outcome["last"]["worst10"])
        assert last[f"outcome/{name}/best_by_validation"] == pytest.approx(outcome["best_by_validation"])
    assert last["outcome/bytes_up"] == pytest.approx(told["bytes_up"])


def test_tensorboard(run: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    curves: Curves = {}
    for name in found.Tags()["scalars"]:
        events = found.Scalars(name)
        curves[name] = {event.step: event.value for event in events}
        assert len(curves[name]) == len(events), f"{name}: a step twice"
    assert_as_written(curves, run, clock=True)
    assert_outcome({name: list(curve.values())[-1] for name, curve in curves.items()}, run)
    text = found.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert json.loads(text)["federation"]["join_ratio"] == 0.5


def test_mlflow(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(run / "mlruns").as_uri())
    (experiment,) = [e for e in client.search_experiments() if e.name == "coterie"]
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.status, found.info.run_name) == ("FINISHED", "run")
    assert found.data.params["method.train.lr"] == str(
        json.loads((run / "config.json").read_text())["method"]["train"]["lr"]
    )
    curves: Curves = {}
    for name in found.data.metrics:
        events = client.get_metric_history(found.info.run_id, name)
        curves[name] = {event.step: event.value for event in events}
        assert len(curves[name]) == len(events), f"{name}: a step twice"
    assert_as_written(curves, run, clock=False)
    assert_outcome(found.data.metrics, run)
    kept = {item.path for item in client.list_artifacts(found.info.run_id)}
    assert kept >= {"config.json", "result.json", "clients.csv", "partition.npz"}
    assert not any("model" in name for name in kept)
    stored = client.download_artifacts(found.info.run_id, "result.json")
    assert Path(stored).read_bytes() == (run / "result.json").read_bytes()


def test_wandb(run: Path) -> None:
    """One run in three files: stopped, killed, ended. The one that was killed may lack its last moment."""
    stopped, killed, ended = (read_wandb(path) for path in sorted((run / "wandb").glob("offline-run-*/*.wandb")))
    ids = {found["run"] for found in (stopped, killed, ended)}
    assert ids == {(json.loads((run / "tracking.json").read_text())["W&B"], "coterie")}
    assert ended["config"]["data"]["clients"] == 4
    assert_outcome(ended["summary"], run)
    assert ended["artifacts"] >= {"config.json", "result.json", "clients.csv", "partition.npz"}
    first, last = max(stopped["curves"]["bytes/up"]), min(ended["curves"]["bytes/up"])
    assert sorted(stopped["curves"]["bytes/up"]) == list(range(1, first + 1))
    assert all(first < number for number in killed["curves"].get("bytes/up", ()))
    curves: Curves = {}
    for found in (stopped, killed, ended):
        for name, curve in found["curves"].items():
            curves.setdefault(name, {}).update(curve)
    assert_as_written(curves, run, clock=True, lost=range(first + 1, last))


def read_wandb(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"curves": {}, "summary": {}, "config": {}, "artifacts": set()}
    for record in records(path):
        if record.WhichOneof("record_type") == "run":
            found["run"] = (record.run.run_id, record.run.project)
            found["config"] |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        values = {(item.key or item.nested_key[0]): json.loads(item.value_json) for item in record.history.item}
        for name, value in values.items():
            if name != "round" and not name.startswith("_"):
                curve = found["curves"].setdefault(name, {})
                assert values["round"] not in curve, f"{name}: a round twice"
                curve[values["round"]] = value
        found["artifacts"] |= {entry.path for entry in record.artifact.manifest.contents}
        for item in record.summary.update:
            found["summary"][item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
    return found


def test_nobody_is_called(guarded: Guarded, run: Path) -> None:
    assert (guarded.folder / "guarded").exists()
    assert not guarded.called()
    with socket.create_connection(guarded.proxy.getsockname()):  # it would have been noticed
        assert guarded.called()


def train(out: Path | None, **how: Any) -> coterie.Result:
    where = coterie.Execution(backend="looped", processes=1)
    return coterie.run(toy.method("fedavg"), toy.toy(), toy.network(), rounds=3, backend=where, out=out, **how)


@pytest.mark.parametrize(
    ("name", "module"), [("tensorboard", "tensorboard.compat.proto"), ("wandb", "wandb"), ("mlflow", "mlflow")]
)
def test_a_package_that_is_missing(name: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(CoterieError, match=rf"pip install 'coterie\[{name}\]'"):
        train(tmp_path / "run", track=name)
    assert not (tmp_path / "run").exists()


def test_groups_of_clients(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    hospitals = coterie.load_clients("heart-disease")
    dominant = coterie.load_clients(num_clients=6, local_size=20, test_size=10)
    for name, data, model in (("natural", hospitals, "mlp"), ("dominant", dominant, "linear")):
        out = tmp_path / name
        coterie.run("fedavg", data, model, rounds=2, out=out, track="tensorboard", progress=False)
        found = EventAccumulator(str(out / "tensorboard"))
        found.Reload()
        with (out / "clients.csv").open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["round"] == "2" and row["point"] == "pre"]
        scores = [float(row["accuracy"]) for row in rows]
        if name == "natural":
            expected = dict(zip(hospitals.client_names, scores, strict=True))
        else:  # clients 0 and 5 are of one group, the others alone
            expected = {"group0": (scores[0] + scores[5]) / 2} | {f"group{i}": scores[i] for i in range(1, 5)}
        last = {group: found.Scalars(f"pre/accuracy_{group}")[-1] for group in expected}
        assert {event.step for event in last.values()} == {2}
        assert {group: event.value for group, event in last.items()} == pytest.approx(expected, abs=1e-6)


def test_what_cannot_be_tracked(tmp_path: Path) -> None:
    with pytest.raises(CoterieError, match="did you mean 'tensorboard'"):
        train(tmp_path / "run", track="tensorbord")
    with pytest.raises(CoterieError, match="pass one as `out`"):
        train(None, track="tensorboard")


def test_a_full_disk_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Disk(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, content: Any) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    class Full(TensorBoard):
        def log(self, step: int, values: Any) -> None:
            if step == 2:
                self.file.close()
                self.file = io.BufferedWriter(Disk())
                self.writer = self.writer_of(self.file)
            super().log(step, values)

    monkeypatch.setitem(TRACKERS, "wandb", Full)
    with caplog.at_level(logging.WARNING, "coterie"):
        train(tmp_path / "run", track=["wandb"])
    said = [record.getMessage() for record in caplog.records]
    assert said == ["TensorBoard failed and is dropped for the rest of this run: No space left on device"]
    assert (tmp_path / "run" / "result.json").exists()


def test_a_tracker_that_comes_later_is_shown_all(tmp_path: Path) -> None:
    """The first part of the run was not tracked, the second is."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    class Cut(Exception):
        pass

    def cut(record: Any) -> None:
        if record.number == 3:
            raise Cut

    with pytest.raises(Cut):
        train(tmp_path / "run", watch=cut)
    train(tmp_path / "run", exist="resume", track="tensorboard")
    found = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    found.Reload()
    assert [event.step for event in found.Scalars("pre/accuracy")] == [1, 2, 3]
