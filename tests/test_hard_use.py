"""Coterie as its most demanding users meet it: long runs, many clients, odd data, odd names, odd surroundings."""

from __future__ import annotations

import csv
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import coterie
from coterie.cli import main
from coterie.core.data import FederatedData, Split
from coterie.execution import Looped, Stacked
from coterie.federation import Round
from coterie.methods import METHODS
from coterie.runs.checkpoint import MOST
from tests import toy

TINY = ["--num-clients", "4", "--local-size", "40", "--test-size", "20", "--processes", "1", "--model", "linear"]
ONE_ROUND = [*TINY, "--rounds", "1"]
ODD_NAME = "ö 日本 'q\" %s {} $HOME"


def blobs(clients: int) -> FederatedData:
    """Three clouds of points; every client has eight, and is tested on four."""
    draw = torch.Generator().manual_seed(0)

    def points(each: int) -> Split:
        y = torch.randint(0, 3, (each * clients,), generator=draw)
        x = torch.randn(each * clients, 4, generator=draw)
        x[torch.arange(len(y)), y] += 2
        return Split(x, y, (each,) * clients)

    return FederatedData("blobs", 3, points(8), points(4))


def tiny() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


class Gauge:
    """What a run needs, noted after every round."""

    def __init__(self, out: Path) -> None:
        self.checkpoint = out / "checkpoint"
        self.seconds, self.memory, self.files = list[float](), list[int](), list[dict[str, int]]()
        self.last = time.process_time()

    def __call__(self, record: Round) -> None:
        now = time.process_time()  # of this process only: other work on the machine does not count
        self.seconds.append(now - self.last)
        self.last = now
        self.memory.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
        sizes = {}
        for path in self.checkpoint.glob("*.*"):
            try:
                sizes[path.name] = path.stat().st_size
            except FileNotFoundError:  # an old one, removed meanwhile
                continue
        self.files.append(sizes)


def check_growth(method: str, rounds: int, out: Path) -> None:
    """The history is kept, and nothing else grows: neither memory nor time nor the files of checkpoints."""
    gauge, clients = Gauge(out), 100
    coterie.run(
        method, blobs(clients), tiny(), rounds=rounds, join_ratio=0.3, lr=0.01, batch_size=8, local_epochs=1,
        backend="stacked", out=out, watch=gauge,
    )  # fmt: skip
    quarter = rounds // 4
    early, late = gauge.seconds[quarter : 2 * quarter], gauge.seconds[3 * quarter : rounds]
    assert statistics.median(late) < 1.5 * statistics.median(early)
    grown = gauge.memory[rounds - 1] - gauge.memory[quarter]
    numbers = 8 * (4 * (2 * clients + 30) + 30 + 30 * 30)  # bytes of a round's record: scores at three points, a report
    assert grown < 3 * numbers * (rounds - quarter) + 4e6
    for sizes in gauge.files:
        states = [size for name, size in sizes.items() if name.startswith("clients-")]
        assert len(states) <= MOST + 2
        assert sum(states) < 5e5
        assert len([name for name in sizes if name.startswith("server-")]) <= 3
    lines = [sizes.get("history.jsonl", 0) for sizes in gauge.files]
    assert max(lines) < 1.2 * rounds * 4 / 3 * numbers + 1e5  # base64


def test_nothing_grows_but_the_history(tmp_path: Path) -> None:
    check_growth("fedper", 60, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "fedpac", "scaffold"])
def test_a_thousand_rounds(method: str, tmp_path: Path) -> None:
    check_growth(method, 1000, tmp_path / "run")


def many(clients: int, out: Path) -> None:
    coterie.run(
        "fedper", blobs(clients), tiny(), rounds=1, join_ratio=20 / clients, full_last_round=False,
        batch_size=8, local_epochs=1, backend="stacked", out=out,
    )  # fmt: skip
    run = coterie.load_run(out, model=tiny())
    assert len(run.clients) == clients
    assert len(list((out / "models").iterdir())) == clients + 3  # server, start, checksums
    x = torch.randn(5, 4)
    assert run.personal_model(clients - 1)(x).shape == (5, 3)


def test_a_thousand_clients_wait_for_the_disk_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[str]()
    monkeypatch.setattr(os, "sync", lambda: calls.append("sync"))
    many(1000, tmp_path / "run")
    assert calls == ["sync"]


@pytest.mark.slow
def test_ten_thousand_clients(tmp_path: Path) -> None:
    start = time.process_time()
    many(10_000, tmp_path / "run")
    assert time.process_time() - start < 60


def test_all_is_on_the_disk_before_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model was waited for by its name when result.json appears."""
    waited, real, at_the_end = set[str](), os.fsync, list[set[str]]()

    def fsync(file: int) -> None:
        name = os.readlink(f"/proc/self/fd/{file}")
        if name.endswith("result.json.part"):
            at_the_end.append(set(waited))
        waited.add(Path(name).name)
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    coterie.run("fedavg", blobs(5), tiny(), rounds=1, out=tmp_path / "run")
    models = {path.name for path in (tmp_path / "run" / "models").iterdir()}
    assert len(models) == 8
    assert {*models, "models", "metrics.csv", "clients.csv"} <= at_the_end[0]


# Data at the edge of what there can be, for every method.

EDGES: dict[str, dict[str, Any]] = {
    "nobody is tested": {"train": (9, 8, 7), "test": (0, 0, 0)},
    "one is not tested": {"train": (9, 8, 7), "test": (3, 0, 2)},
    "one sample each": {"train": (1, 1, 1), "test": (1, 1, 1)},
    "one sample in all": {"train": (1,), "test": (1,)},
}


def with_labels(data: FederatedData, label: Any) -> FederatedData:
    """The same with other training labels: label(client, y)."""
    y = torch.cat([label(i, data.train.client(i)[1]) for i in range(data.num_clients)])
    return FederatedData(data.name, data.classes, Split(data.train.x, y, data.train.sizes), data.test)


def edge(name: str) -> FederatedData:
    if name in EDGES:
        return toy.toy(**EDGES[name], augmented=False)
    data = toy.toy(train=(9, 8, 7), test=(3, 4, 2), augmented=False)
    if name == "a client of one class":
        return with_labels(data, lambda i, y: torch.full_like(y, 2) if i == 1 else y)
    if name == "everybody has one class":
        return with_labels(data, lambda i, y: torch.full_like(y, i))
    assert name == "a class that nobody has"
    return with_labels(data, lambda i, y: y % (toy.CLASSES - 1))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, Looped) for name in (*EDGES, "a client of one class", "a class that nobody has")),
        ("one sample each", Stacked),
        ("everybody has one class", Stacked),
    ],
)
def test_edges_of_data(name: str, kind: Any, method: str, caplog: pytest.LogCaptureFixture) -> None:
    """Numbers that are finite, no warnings, a score for everybody who is tested."""
    data = edge(name)
    clients = kind(toy.method(method, local_epochs=1), toy.model(), data, 7)
    found, history = toy.outcome(clients, join_ratio=1.0, rounds=2)
    assert caplog.text == ""
    assert all(t.isfinite().all() for t in found.values())
    pre = [r.scores["pre", "test"] for r in history if ("pre", "test") in r.scores][-1]
    assert pre.total.tolist() == list(data.test.sizes)
    assert bool((pre.weighted <= pre.total).all())
    assert bool(pre.loss.isfinite().all())


def test_nobody_is_tested_and_all_is_written(tmp_path: Path) -> None:
    """A run folder without one accuracy can be listed and reported."""
    data = FederatedData("untested", 3, blobs(3).train, Split(torch.zeros(0, 4), torch.zeros(0).long(), (0, 0, 0)))
    coterie.run("fedper", data, tiny(), rounds=2, out=tmp_path / "run")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["outcomes"][0]["last"]["mean"] is None
    assert [c.score for c in coterie.load_run(tmp_path / "run").members] == [None] * 3
    main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "report.html")])
    assert "untested" in (tmp_path / "report.html").read_text(encoding="utf-8")


# Data of one's own, and names.


def own_images(path: Path) -> None:
    """Two hundred classes of half-precision images: one pixel is bright, and says which class it is."""
    draw, each = np.random.default_rng(0), 12
    y = np.repeat(np.arange(200), each)
    x = draw.random((len(y), 1, 16, 16)).astype(np.float16) / 8
    x.reshape(len(y), -1)[np.arange(len(y)), y] = 1
    with path.open("wb") as file:
        np.savez(file, x=x, y=y, client=np.arange(len(y)) % 3)


@pytest.mark.parametrize("odd", [ODD_NAME, os.fsdecode(b"not \xff text")], ids=["unicode", "bytes"])
def test_two_hundred_classes_of_float16_images_under_odd_names(
    odd: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data, out = Path(f"{odd}.npz"), Path("runs") / odd
    own_images(data)
    main(
        ["run", "fedper", "--dataset", str(data), "--model", "linear", "--rounds", "4", "--lr", "0.5", "--json",
         "--processes", "1", "--out", str(out), *(["--state-dir", f"state {odd}"] if odd.isprintable() else [])]
    )  # fmt: skip
    outcome = json.loads(capsys.readouterr().out)["outcomes"][0]
    assert outcome["mean"] > 0.5
    assert json.loads((out / "config.json").read_text())["command"]["dataset"] == str(data)
    with (out / "classes.csv").open() as file:
        assert {len(row) for row in csv.reader(file)} == {201}
    main(["models", str(out), "--json"])
    assert len(json.loads(capsys.readouterr().out)) == 3
    main(["evaluate", str(out), "--client", "0", "--json"])
    assert json.loads(capsys.readouterr().out)["clients"][0]["samples"] > 0
    main(["export", str(out), "--client", "0", "--to", "safetensors", "--out", f"{odd}.safetensors"])
    main(["report", str(out), "--out", f"{odd}.html"])
    assert {"runs", f"{odd}.npz", f"{odd}.safetensors", f"{odd}.safetensors.README.json", f"{odd}.html"} <= set(
        os.listdir(".")
    )


def test_files_are_for_those_whom_the_user_allows(tmp_path: Path) -> None:
    for mask, mode in ((0o022, 0o644), (0o077, 0o600)):
        out, before = tmp_path / f"{mask}", os.umask(mask)
        try:
            main(["run", "fedavg", *ONE_ROUND, "--out", str(out), "--json"])
            main(["export", str(out), "--client", "0", "--to", "safetensors", "--out", str(out / "given.safetensors")])
        finally:
            os.umask(before)
        modes = {path.name: path.stat().st_mode & 0o777 for path in out.rglob("*") if path.is_file()}
        assert modes == dict.fromkeys(modes, mode)


# Surroundings.


def called(
    *arguments: str, cwd: Path, before: str = "", python: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """The command in a shell, with these variables and no others; `{}` in `before` stands for it."""
    source = Path(coterie.__file__).parents[1]
    kept = {"PATH": os.environ["PATH"], "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    command = before or "{}"
    words = command.replace("{}", f'{python or sys.executable} -m coterie "$@"')
    return subprocess.run(
        ["bash", "-c", words, "bash", *arguments], capture_output=True, text=True, cwd=cwd, errors="replace",
        env=kept | environment, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    "environment",
    [
        {},  # no HOME, among others
        {"HOME": "/nonexistent", "TERM": "dumb", "COLUMNS": "40"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},  # ASCII only
    ],
    ids=["no HOME", "narrow", "ASCII"],
)
def test_other_surroundings(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "é 日本").mkdir()
    done = called("run", "fedavg", *ONE_ROUND, "--out", "é 日本/run", cwd=tmp_path, **environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "é 日本" / "run" / "result.json").exists()
    table = done.stdout[done.stdout.index("Accuracy on") :]  # the lines before it are for logs
    lines = table.splitlines()
    assert max(map(len, lines[:-1])) <= int(environment.get("COLUMNS", 80))


@pytest.mark.parametrize(
    ("before", "code"),
    [
        ("{} <&- >&- 2>&-", 0),
        ("{} >/dev/full", 2),  # what is asked for is not told, so it has failed
        ("mkdir gone && cd gone && rmdir ../gone && {}", 2),
    ],
)
def test_streams_and_folders_that_are_gone(before: str, code: int, tmp_path: Path) -> None:
    done = called("methods", "--json", cwd=tmp_path, before=before)
    assert done.returncode == code, done.stderr
    assert len(done.stderr.splitlines()) == (1 if code else 0)


def test_devices_are_written_to_and_not_replaced(tmp_path: Path) -> None:
    main(["run", "fedavg", *ONE_ROUND, "--out", str(tmp_path / "run"), "--json"])
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    done = subprocess.Popen(
        [sys.executable, "-m", "coterie", "report", str(tmp_path / "run"), "--out", str(pipe)],
        stdout=subprocess.DEVNULL,
    )
    os.set_blocking(reader, True)
    deadline, content = time.monotonic() + 60, b""
    while b"</html>" not in content and time.monotonic() < deadline:
        content += os.read(reader, 1 << 16)
        time.sleep(0 if content else 0.05)
    os.close(reader)
    assert done.wait(60) == 0
    assert content.startswith(b"<!")
    assert pipe.is_fifo()


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that everybody can read. pytest closes its own to others, again whenever another pytest starts."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root, to become somebody else")
def test_a_read_only_install_and_folder(open_folder: Path) -> None:
    """Somebody who owns nothing here: the package cannot be written to, and neither can the current folder."""
    package, current, mine = open_folder / "package", open_folder / "current", open_folder / "mine"
    shutil.copytree(Path(coterie.__file__).parent, package / "coterie", ignore=shutil.ignore_patterns("__pycache__"))
    for path in (package, *package.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    current.mkdir(mode=0o555)
    mine.mkdir()
    os.chown(mine, 65534, 65534)
    nobody = "setpriv --reuid 65534 --regid 65534 --clear-groups {}"
    if called("--version", cwd=current, before=nobody).returncode:
        pytest.skip("the interpreter is not for everybody")
    done = called("run", "fedavg", *ONE_ROUND, "--out", str(mine / "run"), cwd=current, before=nobody,
                  PYTHONPATH=str(package))  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    for arguments in (["run", "fedavg", *ONE_ROUND], ["report", str(mine / "run")]):
        refused = called(*arguments, cwd=current, before=nobody, PYTHONPATH=str(package))
        assert refused.returncode == 2
        assert "Permission denied" in refused.stderr
        assert len(refused.stderr.splitlines()) == 1
    assert list(current.iterdir()) == []
    assert not list(package.rglob("__pycache__"))
