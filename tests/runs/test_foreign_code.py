"""Run folders from elsewhere whose config.json names code: it is imported only if the user names it on this call."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import coterie
from coterie.cli import main
from coterie.core.errors import CoterieError
from coterie.core.importing import imported
from tests import toy
from tests.signing import sign

CODE = """
import pathlib
from torch import nn

pathlib.Path({marker!r}).write_text("imported")


def Net(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 6), nn.ReLU(), nn.Linear(6, classes))
"""
RUN = ["run", "fedavg", "--num-clients", "3", "--local-size", "20", "--test-size", "10", "--rounds", "2"]
Say = Callable[..., str]


class Place:
    """A working directory with a module that leaves a marker when it is imported, and a run that names it."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name, self.marker = folder, f"{name}:Net", folder / "marker"
        (folder / f"{name}.py").write_text(CODE.format(marker=str(self.marker)))
        self.samples = folder / "x.npz"
        rng = np.random.default_rng(0)
        np.savez(self.samples, x=rng.integers(0, 255, (6, 1, 28, 28), dtype=np.uint8), y=np.array(["Coat", "Bag"] * 3))

    def forget(self) -> None:
        """As if the module had never been imported."""
        sys.modules.pop(self.name.partition(":")[0], None)
        self.marker.unlink(missing_ok=True)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Place:
    monkeypatch.chdir(tmp_path)
    found = Place(tmp_path, f"code_of_{abs(hash(request.node.name))}")
    main([*RUN, "--model", found.name, "--out", "run", "--json"])
    assert found.marker.exists()  # named on this call
    found.forget()
    return found


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """What a command that is refused says."""

    def said(*arguments: str) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main(list(arguments))
        assert stopped.value.code == 2
        return capsys.readouterr().err

    return said


def commands(place: Place) -> list[list[str]]:
    x = str(place.samples)
    return [
        ["predict", "run", "--client", "0", x],
        ["evaluate", "run", "--client", "0", "--data", x],
        ["export", "run", "--client", "0", "--to", "safetensors", "--out", "c.safetensors"],
        ["adapt", "run", "--data", x, "--out", "new"],
    ]


def stopped(place: Place) -> Path:
    """The folder as it was left by a run that was killed."""
    (place.folder / "run" / "result.json").unlink()
    return place.folder / "run"


def test_no_command_imports_what_a_folder_names(place: Place, say: Say) -> None:
    for command in commands(place):
        said = say(*command)
        assert f"run needs code outside Coterie ({place.name}): pass --model {place.name} if you trust it" in said
        assert said.count("\n") == 1
        assert not place.marker.exists()
    main(["models", "run"])
    main(["report", "run", "--out", "report.html"])
    stopped(place)
    assert f"pass --model {place.name} if you trust it" in say("resume", "run")
    assert not place.marker.exists()


@pytest.mark.parametrize("flag", ["--model", "--trust-code"])
def test_what_the_user_accepts_is_imported(place: Place, capfd: pytest.CaptureFixture[str], flag: str) -> None:
    accept = [flag, place.name] if flag == "--model" else [flag]
    for command in commands(place):
        main([*command, *accept])
        assert place.marker.exists()
        place.forget()
        assert str(place.folder) not in sys.path
    stopped(place)
    capfd.readouterr()
    main(["resume", "run", *accept])
    assert place.marker.exists()
    told = f"trusting code that the run folder names: model {place.name} from {place.folder}"
    assert (told in capfd.readouterr().err) == (flag == "--trust-code")


def test_python_has_the_same_rule(place: Place) -> None:
    run = coterie.load_run("run")
    with pytest.raises(CoterieError, match="needs code outside Coterie"):
        run.personal_model(0)
    assert not place.marker.exists()
    coterie.load_run("run", model=place.name).personal_model(0)
    place.forget()
    coterie.load_run("run", trust_code=True).personal_model(0)


def test_another_model_than_the_run_began_with(place: Place, say: Say) -> None:
    stopped(place)
    assert f"pass --model {place.name} if you trust it" in say("resume", "run", "--model", "other:Net")


def test_the_folder_of_the_first_command_is_not_searched(
    place: Place, say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module of the name that the user gives, in the folder that only config.json names."""
    stopped(place)
    (tmp_path / "elsewhere").mkdir()
    shutil.move(tmp_path / "run", tmp_path / "elsewhere" / "run")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert "cannot import model" in say("resume", "run", "--model", place.name)
    assert not place.marker.exists()


def test_modules_of_the_working_directory_shadow_nothing(tmp_path: Path) -> None:
    """A folder from elsewhere as the working directory, with modules by the names of those that Coterie imports."""
    marker = tmp_path / "marker"
    for name in ("onnx", "wandb", "tensorboard", "yaml", "pyarrow", "PIL"):
        (tmp_path / f"{name}.py").write_text(CODE.format(marker=str(marker)))
    environment = {"PYTHONPATH": ":".join(path for path in sys.path if path)}
    command = [sys.executable, "-P", "-c", "from coterie.cli import main; main()", "recipes"]  # as if it was installed
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert not marker.exists()


@pytest.mark.parametrize("setting", ["ray_address", "state_dir"])
def test_what_reaches_out_of_the_folder_is_named_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, say: Say, setting: str
) -> None:
    monkeypatch.chdir(tmp_path)
    main([*RUN, "--model", "linear", "--out", "run", "--json"])
    (tmp_path / "run" / "result.json").unlink()
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    config["command"][setting] = "/outside"
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    sign(tmp_path / "run")
    assert f"uses --{setting.replace('_', '-')} /outside" in say("resume", "run")


@pytest.mark.parametrize(("name", "value"), [("cwd", 3), ("method", ["a"]), ("seed", "x"), ("dataset", {"a": 1})])
def test_a_command_that_was_made_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, say: Say, name: str, value: object
) -> None:
    monkeypatch.chdir(tmp_path)
    main([*RUN, "--model", "linear", "--out", "run", "--json"])
    (tmp_path / "run" / "result.json").unlink()
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    config["command"][name] = value
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    sign(tmp_path / "run")
    assert f"the command that began it is damaged: {name} is" in say("resume", "run")


def test_relative_paths_are_those_of_the_first_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without going there: a run on data of one's own goes on from another folder."""
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for site in "ab":
        rows = "".join(f"{i},{i * i},{i % 2}\n" for i in range(12))
        (tmp_path / "here" / "sites").mkdir(exist_ok=True)
        (tmp_path / "here" / "sites" / f"{site}.csv").write_text(f"p,q,y\n{rows}")
    main(["run", "fedavg", "--dataset", "sites", "--model", "linear", "--rounds", "2", "--out", "run", "--json"])
    (tmp_path / "here" / "run" / "result.json").unlink()
    monkeypatch.chdir(tmp_path / "there")
    main(["resume", "../here/run", "--json"])
    assert Path.cwd() == tmp_path / "there"
    assert (tmp_path / "here" / "run" / "result.json").exists()


def test_imports_leave_the_path_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fails_of_strangers.py").write_text("1 / 0")
    before = list(sys.path)
    with pytest.raises(CoterieError, match="division by zero"):
        imported("model", "fails_of_strangers:Net")
    assert sys.path == before
    assert callable(imported("model", "tests.toy:network"))
    assert sys.path == before
    assert toy.network() is not None
