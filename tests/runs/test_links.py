"""Run folders from elsewhere with links and pipes in them: nothing outside is read, changed or deleted."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import coterie
from coterie.api.comparison_folder import COMMAND
from coterie.cli import main
from coterie.core.errors import CoterieError
from coterie.federation import Round
from coterie.papers.results import Shelf
from coterie.personal.adapt import adapt
from coterie.runs.disk import Foreign, check_tree, open_inside, read_inside, subfolder, whole
from coterie.runs.finding import open_run
from tests import toy

FILES = ("config.json", "metrics.csv", "clients.csv", "classes.csv", "partition.npz", "result.json", "log.txt",
         "checksums.json", "models/models.sha256", "models/start.safetensors", "models/client-0.safetensors",
         "partition.svg")  # fmt: skip
UNFINISHED = ("config.json", "metrics.csv", "clients.csv", "log.txt", "checksums.json", "checkpoint/history.jsonl",
              "checkpoint/server-000001.safetensors", "metrics.csv.part", "config.json.part", "partition.npz",
              "checkpoint/x.safetensors", "tensorboard", "mlruns", "wandb", "tracking.json")  # fmt: skip
SETTINGS = ["--num-clients", "3", "--local-size", "20", "--test-size", "10", "--model", "linear", "--json"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "run"
    main(["run", "fedavg", *SETTINGS, "--rounds", "2", "--out", str(out)])
    return out


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after its second round of three."""
    out = tmp_path_factory.mktemp("unfinished") / "run"
    data = coterie.load_clients(num_clients=3, local_size=20, test_size=10)
    command = {"method": "fedavg", "seed": 0, "cwd": str(out.parent), "model": "linear", "rounds": 3}
    command |= {"num_clients": 3, "local_size": 20, "test_size": 10}

    class Enough(Exception):
        pass

    def stop(record: Round) -> None:
        if record.number == 3:
            raise Enough

    with pytest.raises(Enough):
        coterie.run("fedavg", data, "linear", rounds=3, out=out, watch=stop, config={"command": command})
    assert (out / "checkpoint" / "history.jsonl").exists()
    return out


class Outside:
    """A folder that no command may touch, and what it holds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "inner").mkdir(parents=True)
        for name in ("precious.txt", "inner/server-000009.safetensors", "inner/x.part"):
            (folder / name).write_bytes(b"precious " * 50)
        self.before = self.state()

    def state(self) -> dict[str, tuple[bytes, int]]:
        files = [path for path in sorted(self.folder.rglob("*")) if path.is_file()]
        return {str(path.relative_to(self.folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}

    def untouched(self) -> bool:
        return self.state() == self.before


@pytest.fixture
def outside(tmp_path: Path) -> Outside:
    return Outside(tmp_path / "outside")


def as_link(path: Path, outside: Outside) -> None:
    """A link to the same content outside, so that only its being a link is wrong."""
    target = outside.folder / path.name
    if path.is_file():
        shutil.copy(path, target)
    else:
        target.write_text("{}")
    path.unlink(missing_ok=True)
    path.symlink_to(target)
    outside.before = outside.state()


def as_pipe(path: Path, outside: Outside) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def as_folder_link(path: Path, outside: Outside) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(outside.folder / "inner")


KINDS: dict[str, Callable[[Path, Outside], None]] = {"link": as_link, "pipe": as_pipe, "folder": as_folder_link}


def refused(*arguments: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    assert stopped.value.code == 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", UNFINISHED)
def test_resume_refuses_links_and_pipes(
    unfinished: Path, outside: Outside, tmp_path: Path, name: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(unfinished, tmp_path / "run"))
    KINDS[kind](run / name, outside)
    refused("resume", str(run))
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "only plain files and folders inside a run folder" in said
    assert outside.untouched()


def test_resume_refuses_a_linked_folder_of_checkpoints(unfinished: Path, outside: Outside, tmp_path: Path) -> None:
    """Files that look like old checkpoints were deleted through such a link."""
    run = Path(shutil.copytree(unfinished, tmp_path / "run"))
    shutil.move(run / "checkpoint", outside.folder / "checkpoint")
    (outside.folder / "checkpoint" / "clients-000099.safetensors").write_bytes(b"precious")
    (run / "checkpoint").symlink_to(outside.folder / "checkpoint")
    outside.before = outside.state()
    refused("resume", str(run))
    assert outside.untouched()


@pytest.mark.parametrize("name", ["log.txt", "tensorboard"])
def test_resume_from_python_has_the_same_rule(unfinished: Path, outside: Outside, tmp_path: Path, name: str) -> None:
    """Also for files that only a library would open."""
    run = Path(shutil.copytree(unfinished, tmp_path / "run"))
    as_link(run / name, outside)
    data = coterie.load_clients(num_clients=3, local_size=20, test_size=10)
    with pytest.raises(Foreign, match=name):
        coterie.run("fedavg", data, "linear", rounds=3, out=run, exist="resume")
    assert outside.untouched()


def test_hard_links_are_not_appended_to(tmp_path: Path) -> None:
    (tmp_path / "outside.txt").write_text("precious")
    (tmp_path / "run").mkdir()
    os.link(tmp_path / "outside.txt", tmp_path / "run" / "log.txt")
    for mode in ("ab", "w+b"):
        with pytest.raises(Foreign, match="second name"):
            open_inside(tmp_path / "run", "log.txt", mode)
    assert (tmp_path / "outside.txt").read_text() == "precious"
    assert read_inside(tmp_path / "run", "log.txt") == b"precious"  # reading it harms nothing


@pytest.mark.parametrize("kind", ["link", "pipe"])
@pytest.mark.parametrize("name", FILES)
def test_commands_that_read_refuse_links_and_pipes(
    finished: Path, outside: Outside, tmp_path: Path, name: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    KINDS[kind](run / name, outside)
    np.savez(tmp_path / "x.npz", x=np.zeros((4, 1, 28, 28), np.uint8), y=np.array(["Coat", "Bag", "Shirt", "Dress"]))
    commands = {
        "report": ["report", str(run), "--out", str(tmp_path / "r.html")],
        "predict": ["predict", str(run), "--client", "0", str(tmp_path / "x.npz")],
        "evaluate": ["evaluate", str(run), "--client", "0"],
        "export": [
            "export",
            str(run),
            "--client",
            "0",
            "--to",
            "safetensors",
            "--out",
            str(tmp_path / "c.safetensors"),
        ],
        "adapt": ["adapt", str(run), "--data", str(tmp_path / "x.npz"), "--out", str(tmp_path / "new")],
    }
    readers = {"log.txt": {"report"}, "models/client-0.safetensors": {"predict", "evaluate", "export"}}
    readers["models/start.safetensors"] = commands.keys() - {"report"}
    for command in readers.get(name, commands.keys()):
        refused(*commands[command])
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert Path(name).name in said
    assert outside.untouched()


def test_the_folder_itself_may_be_a_link(finished: Path, unfinished: Path, tmp_path: Path) -> None:
    (tmp_path / "finished").symlink_to(finished)
    assert len(coterie.load_run(tmp_path / "finished").members) == 3
    assert open_run(tmp_path / "finished").result
    shutil.copytree(unfinished, tmp_path / "real")
    (tmp_path / "run").symlink_to(tmp_path / "real")
    main(["resume", str(tmp_path / "run"), "--json"])
    assert (tmp_path / "real" / "result.json").is_file()


def test_writing_replaces_a_link_and_not_its_target(outside: Outside, tmp_path: Path) -> None:
    for name in ("a.json", "a.json.part"):
        (tmp_path / name).symlink_to(outside.folder / "precious.txt")
    with whole(tmp_path / "a.json") as part:
        part.write_text("new")
    assert (tmp_path / "a.json").read_text() == "new"
    assert not (tmp_path / "a.json").is_symlink()
    assert outside.untouched()


def test_every_part_of_a_name_is_checked(outside: Outside, tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(outside.folder)
    with pytest.raises(Foreign):
        read_inside(tmp_path, "a/precious.txt")
    with pytest.raises(Foreign):
        subfolder(tmp_path, "a", make=True)
    with pytest.raises(Foreign):
        check_tree(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_inside(tmp_path, "b/c")


def test_adapt_leaves_other_folders_alone(finished: Path, outside: Outside, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.zeros((4, 1, 28, 28), np.uint8), y=np.array(["Coat", "Bag", "Shirt", "Dress"]))
    (tmp_path / "new").symlink_to(outside.folder)
    with pytest.raises(CoterieError, match="exists already"):
        adapt(coterie.load_run(finished), tmp_path / "x.npz", tmp_path / "new")
    assert outside.untouched()


def test_a_search_refuses_links(outside: Outside, tmp_path: Path) -> None:
    """It deletes the checkpoints of settings that are out."""
    data, settings = toy.toy(augmented=False), {"rounds": 1, "local_epochs": 1, "final": False}
    how = coterie.Execution("looped", processes=1)

    def search() -> None:
        coterie.tune("fedavg", {"lr": [0.1, 0.2]}, data, toy.network(), out=tmp_path / "s", backend=how, **settings)

    search()
    (tmp_path / "s" / "checkpoints").rmdir()
    (tmp_path / "s" / "checkpoints").symlink_to(outside.folder / "inner")
    with pytest.raises(Foreign, match="checkpoints"):
        search()
    assert outside.untouched()


def test_a_comparison_refuses_links(outside: Outside, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = tmp_path / "several"
    base.mkdir()
    (base / COMMAND).write_text("{}")
    (base / "fedavg").symlink_to(outside.folder / "inner")
    refused("resume", str(base))
    assert "fedavg is a link" in capsys.readouterr().err
    assert outside.untouched()


def test_a_folder_of_results_refuses_links(outside: Outside, tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "demo").symlink_to(outside.folder / "inner")
    with pytest.raises(Foreign, match="demo"):
        Shelf(tmp_path / "results").make()
    assert outside.untouched()
