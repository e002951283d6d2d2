"""Single digits and bytes of a finished run's files, changed: every command that uses the file notices."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

import coterie
from coterie.cli import main
from coterie.core.errors import CoterieError
from coterie.personal.adapt import adapt
from coterie.personal.export import export
from coterie.personal.samples import read_samples
from coterie.personal.use import evaluate, predict
from coterie.runs.checksums import CHECKSUMS, Changed, Checksum, GrowingTable, RunFiles
from coterie.runs.finding import open_run
from coterie.runs.stored_run import StoredRun
from tests.runs.test_links import SETTINGS

CHANGES = 40  # of each file
MODELS = {"predict", "evaluate", "export", "adapt"}
ALL = {"report", "models", *MODELS}
USED_BY = {  # file -> who notices; whoever opens a finished run checks all but the models
    **dict.fromkeys(("config.json", "metrics.csv", "clients.csv", "classes.csv", "result.json", "partition.npz"), ALL),
    **dict.fromkeys(("partition.svg", "reports.npz", CHECKSUMS, "models/models.sha256"), ALL),
    "models/client-0.safetensors": {"predict"},
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("finished")
    main(["run", "fedpac", *SETTINGS, "--rounds", "2", "--out", str(base / "run")])
    np.savez(base / "x.npz", x=np.zeros((4, 1, 28, 28), np.uint8), y=np.array(["Coat", "Bag", "Shirt", "Dress"]))
    return base / "run"


def read(path: Path) -> StoredRun:
    """A run as a report reads it."""
    run = open_run(path)
    assert run.missing == []
    return run


def use(command: str, path: Path, samples: Path, out: Path) -> None:
    if command == "report":
        read(path)
        return
    run = coterie.load_run(path)
    if command == "models":
        assert run.members
    elif command == "predict":
        predict(run, 0, read_samples(run, [samples]))
        assert run.census.class_counts.sum()
    elif command == "evaluate":
        evaluate(run, [0])
    elif command == "export":
        export(run, 0, "safetensors", out / "c.safetensors")
    else:
        adapt(run, samples, out / "new")


def changes(content: bytes, seed: str) -> list[bytes]:
    """Single digits, where there are any, and single bits."""
    draw, made = random.Random(seed), list[bytes]()
    digits = [i for i, byte in enumerate(content) if chr(byte).isdigit()]
    while len(made) < CHANGES:
        changed = bytearray(content)
        if len(made) % 2 and digits:
            at = draw.choice(digits)
            changed[at] = ord(draw.choice([d for d in "0123456789" if ord(d) != changed[at]]))
        else:
            changed[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        made.append(bytes(changed))
    return made


def same_json(content: bytes, changed: bytes) -> bool:
    try:
        return bool(json.loads(content) == json.loads(changed))
    except ValueError:
        return False


@pytest.mark.parametrize("name", USED_BY)
def test_changed_digits_are_noticed(finished: Path, tmp_path: Path, name: str) -> None:
    path = Path(shutil.copytree(finished, tmp_path / "run"))
    content, samples = (path / name).read_bytes(), finished.parent / "x.npz"
    for command in sorted(USED_BY[name]):
        use(command, path, samples, tmp_path / command)  # untouched, it works
    silent = []
    for number, changed in enumerate(changes(content, name)):
        if name == CHECKSUMS and same_json(content, changed):
            continue  # only the space between its words
        (path / name).write_bytes(changed)
        for command in sorted(USED_BY[name]):
            try:
                use(command, path, samples, tmp_path / f"{command}-{number}")
            except CoterieError:
                continue
            silent.append((number, command))
    assert silent == []


def test_a_comparison_notices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that was stopped after a run: its table would be made of the changed numbers."""
    base = tmp_path / "compared"
    main(["compare", "fedavg", "local", *SETTINGS, "--rounds", "1", "--out", str(base), "--json"])
    (base / "compare.json").unlink()
    for name in ("config.json", "metrics.csv", "clients.csv", "classes.csv", "result.json"):
        path = base / "fedavg-seed0" / name
        content = path.read_bytes()
        path.write_bytes(content.replace(b"1", b"2", 1))
        capsys.readouterr()
        with pytest.raises(SystemExit):
            main(["resume", str(base), "--json"])
        assert f"fedavg-seed0/{name} is not what the run wrote" in capsys.readouterr().err
        path.write_bytes(content)
    main(["resume", str(base), "--json"])
    assert (base / "compare.json").exists()


@pytest.mark.parametrize("name", ["config.json", "metrics.csv", "clients.csv", "classes.csv", "result.json"])
def test_the_message_names_the_file(finished: Path, tmp_path: Path, name: str) -> None:
    path = Path(shutil.copytree(finished, tmp_path / "run"))
    content = (path / name).read_bytes()
    (path / name).write_bytes(content.replace(b"1", b"2", 1))
    with pytest.raises(Changed, match=rf"run/{name} is not what the run wrote: its SHA-256 differs from checksums"):
        read(path)


def test_a_description_that_was_added_by_hand(finished: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(finished, tmp_path / "run"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "description": "mine"}, indent=2))
    with pytest.raises(Changed, match=r"config\.json has [\d,]+ bytes; the run wrote [\d,]+"):
        coterie.load_run(path)


def test_without_checksums_a_finished_run_is_refused(finished: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(finished, tmp_path / "run"))
    (path / CHECKSUMS).unlink()
    with pytest.raises(Changed, match="cannot be verified"):
        coterie.load_run(path)
    with pytest.raises(Changed, match="cannot be verified"):
        read(path)


def unfinished(finished: Path, to: Path) -> Path:
    path = Path(shutil.copytree(finished, to))
    (path / "result.json").unlink()
    return path


def test_the_tables_of_an_unfinished_run_may_grow_but_not_change(finished: Path, tmp_path: Path) -> None:
    path = unfinished(finished, tmp_path / "run")
    with (path / "metrics.csv").open("a") as file:
        file.write("3,")  # a line that is being written
    assert len(read(path).rounds) == 2
    content = (path / "clients.csv").read_bytes()
    (path / "clients.csv").write_bytes(content.replace(b"post", b"past", 1))
    with pytest.raises(Changed, match=r"clients\.csv"):
        read(path)
    (path / "clients.csv").write_bytes(content[:-5])
    with pytest.raises(Changed, match=r"clients\.csv"):
        read(path)


def test_resume_notices_and_mends(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The configuration decides what is trained: it is refused. Tables are written again from the checkpoint."""
    path = unfinished(finished, tmp_path / "run")
    metrics = (path / "metrics.csv").read_bytes()
    (path / "metrics.csv").write_bytes(metrics.replace(b"1", b"2", 1))
    main(["resume", str(path), "--json"])
    assert "metrics.csv is not what the run wrote" in capsys.readouterr().err
    assert RunFiles(path).read("metrics.csv").count(b"\n") == metrics.count(b"\n")
    path = unfinished(finished, tmp_path / "again")
    config = (path / "config.json").read_text()
    (path / "config.json").write_text(config.replace('"lr": 0.01', '"lr": 0.02'))
    with pytest.raises(SystemExit):
        main(["resume", str(path)])
    assert "config.json is not what the run wrote" in capsys.readouterr().err


def test_checksums_are_those_of_the_files(finished: Path) -> None:
    told = json.loads((finished / CHECKSUMS).read_text())
    assert {"config.json", "metrics.csv", "clients.csv", "classes.csv", "result.json", "partition.npz",
            "reports.npz", "models/models.sha256"} <= told.keys()  # fmt: skip
    for name, found in told.items():
        content = (finished / name).read_bytes()
        assert found == {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def test_checksums_cost_little(tmp_path: Path) -> None:
    """1,000 clients, 20 rounds: the time of all checksums against a bound that a slow disk keeps, too."""
    rows = "".join(f"{i},{i},post,test,50,100,0.5,0.693147\r\n" for i in range(1000))
    table, start = GrowingTable(), time.perf_counter()
    with (tmp_path / "clients.csv").open("wb") as table.file:
        for _ in range(20):
            table.write(rows)
            assert table.checksum.size
    assert time.perf_counter() - start < 0.5
    assert table.checksum == Checksum.of((tmp_path / "clients.csv").read_bytes())
