"""Wrong commands: each is told in a line that says what is wrong, and nothing is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coterie.cli import main
from coterie.runs.jobs import attempt

TINY = ["--num-clients", "4", "--local-size", "40", "--test-size", "20", "--processes", "1", "--model", "linear"]


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a good run, and all that can be mistaken for something else."""
    folder = tmp_path_factory.mktemp("desk")
    main(["run", "fedavg", *TINY, "--rounds", "1", "--out", str(folder / "run"), "--json"])
    (folder / "file").write_text("x")
    (folder / "text.npz").write_text("x")
    (folder / "folder").mkdir()
    for name in ("empty.npz", "photo.png", "cut.yaml", "table.csv"):
        (folder / name).write_bytes({"cut.yaml": b"id: [", "table.csv": b"a,b\n1,2\n"}.get(name, b""))
    images, labels = np.zeros((3, 1, 28, 28), np.uint8), np.zeros(3, np.int64)
    np.savez(folder / "images.npz", x=images, y=np.array(["Trouser"] * 3))
    np.savez(folder / "none.npz", x=images[:0], y=labels[:0])
    np.savez(folder / "unlabelled.npz", x=images)
    np.savez(folder / "numbers.npz", x=np.zeros((3, 5)), y=labels)
    np.savez(folder / "objects.npz", x=np.array([{}], dtype=object))
    return folder


RUN = ["run", "fedavg", *TINY]
PREDICT = ["predict", "run", "--client", "0"]
EXPORT = ["export", "run", "--client", "0", "--to"]
ADAPT = ["adapt", "run", "--data", "images.npz"]
PAPER = ["reproduce", "P1-T1-FMNIST-20"]
LONG = "x" * 300

WRONG: list[tuple[list[str], str]] = [
    ([""], "invalid choice"),
    (["--", "run"], "invalid choice"),
    (["Run"], "invalid choice: 'Run': did you mean 'run'?"),
    (["train", "fedavg"], "invalid choice: 'train' (`coterie --help` explains)"),
    (["run", "fedavg", "--datset", "x"], "unrecognized arguments: --datset x: did you mean --dataset?"),
    (["run", "fedavg", "--epochs", "3"], "did you mean --local-epochs?"),
    (["run", "fedavg", "--learning-rate=0.1"], "did you mean --lr?"),
    (["report"], "coterie report: error: the following arguments are required: RUN"),
    (["run"], "give a METHOD"),
    (["run", ""], "unknown method ''"),
    (["run", "é"], "unknown method 'é'"),
    (["run", "fedavg", "fedper"], "unrecognized arguments: fedper"),
    (
        ["tune", "fedavg", "--over", "lr=0.1,1", "--dp", "client", "--dp-clip", "1"],
        "unrecognized arguments: --dp client",
    ),
    (["tune", "fedavg", "--over", "lr=0.1,1", "--robust", "clip"], "unrecognized arguments: --robust clip"),
    (["tune", "fedavg", "--over", "lr=0.1,1", "--encrypt", "ckks"], "unrecognized arguments: --encrypt ckks"),
    (
        ["predict", "run", "--client", "0", "a.png", "--resize", "24"],
        "unrecognized arguments: 24: --resize takes no value",
    ),
    (["run", "fedpac", "--dataset", "heart-disease", "--num-clients", "3"], "--partition RULE divides it again"),
    ([*RUN, "--rounds", "-1"], "rounds must be at least 1"),
    ([*RUN, "--rounds", "1e3"], "invalid int value"),
    ([*RUN, "--rounds", ""], "invalid int value"),
    ([*RUN, "--num-clients", "-3"], "num_clients must be at least 1, got -3"),
    ([*RUN, "--num-clients", "99999999999999"], "out of memory"),
    ([*RUN, "--local-size", "0"], "local_size must be at least 1, got 0"),
    ([*RUN, "--test-size", "-1"], "test_size must be at least 1, got -1"),
    ([*RUN, "--join-ratio", "nan"], "join_ratio must be finite, got nan"),
    ([*RUN, "--lr", "nan"], "lr must be"),
    ([*RUN, "--lr", "inf"], "lr must be finite, got inf"),
    ([*RUN, "--schedule", "cosin"], "unknown schedule 'cosin': did you mean 'cosine'?"),
    ([*RUN, "--schedule", "exponential:-1"], "must have the form exponential:FACTOR"),
    ([*RUN, "--schedule", "steps:1=nan"], "must have the form steps:START=FACTOR"),
    ([*RUN, "--schedule", "cosine+linear"], "two parts of the same kind over rounds"),
    ([*RUN, "--momentum", "nan"], "momentum must be"),
    ([*RUN, "--weight-decay", "-1"], "weight_decay must be"),
    ([*RUN, "--seed", "-1"], "seed must be at least 0"),
    ([*RUN, "--seed", "99999999999999999999999"], "seed must be at least 0 and below"),
    ([*RUN, "--partition-seed", "-1"], "partition_seed must be at least 0, got -1"),
    ([*RUN, "--validation", "1"], "validation must be at least 0 and less than 1, got 1.0"),
    ([*RUN, "--validation", "nan"], "less than 1, got nan"),
    ([*RUN, "--noniid-s", "nan"], "noniid_s must be between 0 and 100, got nan"),
    ([*RUN, "--normalise", ""], "unknown --normalise value ''"),
    ([*RUN, "--dataset", ""], "unknown dataset ''"),
    ([*RUN, "--dataset", "./folder"], "no data that can be read"),
    ([*RUN, "--dataset", "/dev/null"], "no data that can be read"),
    ([*RUN, "--dataset", "empty.npz"], "not a valid .npz file"),
    ([*RUN, "--dataset", "objects.npz"], "holds Python objects"),
    ([*RUN, "--partition", "empty.npz"], "not a valid partition file"),
    ([*RUN, "--partition", "images.npz"], "not a valid partition file"),
    ([*RUN, "--model", ":"], "cannot import model ':'"),
    ([*RUN, "--model", "os:path"], "not a class or function"),
    ([*RUN, "--head", "nothing"], "nothing"),
    ([*RUN, "--device", "meta"], "device 'meta' cannot be used"),
    ([*RUN, "--device", ""], "device '' cannot be used"),
    ([*RUN, "--precision", "fp8"], "fp8"),
    ([*RUN, "--processes", "0"], "processes must be at least 1"),
    ([*RUN, "--cohort", "-1"], "cohort must be at least 1"),
    ([*RUN, "--state-dir", "file"], "cannot keep client states"),
    ([*RUN, "--out", "run"], "exists already"),
    ([*RUN, "--out", "file/inner"], "cannot create the folder"),
    ([*RUN, "--out", "/proc/nothing"], "cannot create the folder"),
    ([*RUN, "--out", LONG], "File name too long"),
    ([*RUN, "--watch", "99999"], "99999"),
    ([*RUN, "--checkpoint-every", "-1"], "checkpoint_every must be at least 0"),
    ([*RUN, "--max-left-out", "nan"], "max_left_out must be finite"),
    ([*RUN, "--evaluate-every", "0"], "evaluate_every must be at least 1"),
    ([*RUN, "--new-clients", "0.9"], "leaves none to train"),
    (["compare", "fedavg", "--seeds", "-1"], "seeds must be at least 1"),
    (["compare", "fedavg", "--against", "fedper"], "not among the methods"),
    (["compare", "fedavg", "--format", "pdf"], "invalid choice"),
    (["resume", "nowhere"], "not a run folder"),
    (["resume", "file"], "file is a file, not a run folder"),
    (["demo", "--out", "file"], "exists already"),
    (["methods", "x"], "unrecognized arguments"),
    (["data", "x"], "invalid choice"),
    (["pictures", "--out", "file"], "File exists"),
    (["pictures", "--out", "pictures", "--threshold", "nothing"], "nothing"),
    (["models", "nowhere"], "no such folder"),
    (["models", "file"], "no such folder"),
    (["models", "folder"], "is not a run folder"),
    (["predict", "run", "--client", "4", "images.npz"], "clients are 0 to 3"),
    (["predict", "run", "--client", "-1", "images.npz"], "clients are 0 to 3"),
    ([*PREDICT, "nowhere"], "nowhere"),
    ([*PREDICT, "folder"], "folder"),
    ([*PREDICT, "none.npz"], "none.npz"),
    ([*PREDICT, "numbers.npz"], "numbers.npz"),
    ([*PREDICT, "objects.npz"], "objects.npz"),
    ([*PREDICT, "photo.png"], "photo.png"),
    ([*PREDICT, LONG * 20], "xxx"),
    ([*PREDICT, "images.npz", "--top", "0"], "top must be at least 1"),
    (["evaluate", "run", "--client", "1,,2"], "unknown client ''"),
    (["evaluate", "run", "--client", "0", "--data", "unlabelled.npz"], "unlabelled.npz"),
    (["evaluate", "run", "--client", "0", "--data", "none.npz"], "none.npz"),
    (["evaluate", "run", "--client", "0", "--data", "heart-disease"], "heart-disease"),
    ([*EXPORT, "pdf"], "invalid choice"),
    ([*EXPORT, "torch", "--out", "file/m.pt2"], "cannot be written"),
    ([*EXPORT, "safetensors", "--out", "folder"], "must end in .safetensors"),
    (["adapt", "run", "--data", "file"], "file: no data that can be read"),
    ([*RUN, "--partition", "text.npz"], "not a valid partition file"),
    (["adapt", "run", "--data", "folder"], "folder"),
    (["adapt", "run", "--data", "none.npz"], "none.npz"),
    ([*ADAPT, "--epochs", "-1", "--out", "new"], "epochs must be at least"),
    ([*ADAPT, "--out", "run"], "exists already"),
    ([*ADAPT, "--out", "file/new"], "file/new"),
    (["report", "nowhere"], "nowhere"),
    (["report", "file"], "file"),
    (["report", "run", "--out", "folder"], "Is a directory"),
    (["report", "run", "--out", ""], "Is a directory"),
    (["report", "run", "--out", "file/report.html"], "Not a directory"),
    (["report", "run", "--out", "/dev/full"], "No space left"),
    (["table", "nowhere"], "no such folder"),
    (["table", "run", "--columns", "acuracy"], "unknown column 'acuracy': did you mean 'accuracy'?"),
    (["table", "run", "--columns", "by_validation"], "these runs did not measure it"),
    (["table", "run", "--against", "Ditto"], "unknown method to test against 'Ditto'"),
    (["table", "run", "--format", "pdf"], "invalid choice"),
    (["table", "run", "--out", "table.doc"], "table.doc: tables are written as .tex, .md, .csv or .html"),
    (["table", "run", "--out", "nowhere/table.md"], "nowhere/table.md cannot be written"),
    (["recipes", "nothing-like-this"], "no recipe contains"),
    (["reproduce", "P9"], "P9"),
    (["reproduce", "cut.yaml"], "cut.yaml"),
    (["reproduce", "folder"], "folder"),
    ([*PAPER, "--methods", "nobody"], "nobody"),
    ([*PAPER, "--seeds", "0"], "seeds"),
    ([*PAPER, "--seeds", "0", "--show"], "seeds must be at least 1"),
    ([*PAPER, "--rounds", "0"], "rounds"),
    ([*PAPER, "--jobs", "0"], "jobs must be at least 1"),
    ([*PAPER, "--jobs", "-1"], "jobs must be at least 1"),
    ([*PAPER, "--jobs", "2", "--backend", "ray"], "a cluster runs the clients of one training"),
    ([*PAPER, "P9"], "P9"),
    ([*PAPER, "--out", "file/results", "--methods", "Local", "--rounds", "1", "--seeds", "1"], "file/results"),
]


@pytest.mark.parametrize(("arguments", "said"), WRONG, ids=[" ".join(a)[:60] or "nothing" for a, _ in WRONG])
def test_wrong_commands(
    arguments: list[str],
    said: str,
    desk: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(desk)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = sorted(os.listdir(desk))
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    told = capsys.readouterr()
    assert stop.value.code == 2
    assert said in told.err
    assert told.err.count("coterie: ") + told.err.count(": error: ") >= 1
    assert "usage:" not in told.err
    assert told.out == ""
    assert sorted(os.listdir(desk)) == before


def test_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 2
    assert "train one method" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried ..."),
    ],
)
def test_memory_that_does_not_suffice(
    error: RuntimeError, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr("coterie.api.load_clients", fail)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as stop:
        main(RUN)
    assert stop.value.code == 2
    assert capsys.readouterr().err == "coterie: out of memory; try fewer clients per cohort or a smaller batch\n"
    assert attempt(fail, None)[1].startswith("out of memory; try fewer --jobs")


def test_another_error_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect of Coterie's has a traceback. One in this file would be taken for the user's."""
    found: dict[str, Any] = {}
    exec("def fail(*given, **settings): raise RuntimeError('a defect')", found)
    monkeypatch.setattr("coterie.api.load_clients", found["fail"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(RuntimeError, match="a defect"):
        main(RUN)


def test_stopped_while_it_starts(tmp_path: Path) -> None:
    """Ctrl-C while numpy is being imported, which would make an ImportError of it."""
    module = tmp_path / "numpy" / "__init__.py"
    module.parent.mkdir()
    module.write_text(
        "import os, signal\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "except KeyboardInterrupt:\n"
        "    raise ImportError('cannot load module more than once per process')\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "coterie", "run", "fedavg", *TINY],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (130, "coterie: stopped\n")
