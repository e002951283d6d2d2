"""The script next to an ONNX file answers as `coterie predict` does, and ends with one line where that refuses."""

from __future__ import annotations

import json
import random
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import coterie
from coterie.cli import main
from tests import toy

pytestmark = pytest.mark.long

Script = Callable[[str, Path], str]


def table(seed: int, gaps: bool) -> str:
    """Rows of age, crp (which some lack) and pain, where "none" is a category."""
    draw = random.Random(seed)
    lines = ["age,crp,pain,label"]
    for _ in range(40):
        age, crp = draw.randint(20, 90), draw.choice(("", "1") if gaps else ("0.5", "1.5"))
        lines.append(f"{age},{crp},{draw.choice(('none', 'mild', '2'))},{'ill' if age > 55 else 'ok'}")
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of two federations: in the first, missing values are filled."""
    base = tmp_path_factory.mktemp("clinics")
    for name, missing in (("filled", "median"), ("whole", "refuse")):
        (base / f"{name}-data").mkdir()
        for seed, clinic in enumerate("ab"):
            (base / f"{name}-data" / f"{clinic}.csv").write_text(table(seed, missing == "median"))
        data = coterie.load_clients(base / f"{name}-data", missing=missing, normalise="auto")
        coterie.run("fedavg", data, "mlp", rounds=1, local_epochs=1, backend=toy.IN_TURN, out=base / name)
        main(["export", str(base / name), "--client", "a", "--to", "onnx", "--out", str(base / f"{name}.onnx")])
    return base


@pytest.fixture
def script(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Script:
    """What the script of a model prints for a file."""

    def of(model: str, file: Path) -> str:
        monkeypatch.setattr(sys, "argv", ["predict.py", str(file)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            runpy.run_path(str(folder / f"{model}.predict.py"), run_name="__main__")
        shown = capsys.readouterr().out
        if left.value.code:
            assert shown == ""  # no answer next to an error
            raise ValueError(left.value.code)
        return shown

    return of


HEADER = "age,crp,pain\n"


@pytest.mark.parametrize(
    "content",
    [
        HEADER + "50,1.5,none\n61,?,2.0\n",
        HEADER + "50,nan,2\n\n61, N/A ,none\n",  # a blank line, spaces
        "\ufeffage;crp;pain\r\n50;1.5;none\r\n61;;2.0\r\n",  # as Excel saves it
        "pain\tage\tcrp\nnone\t50\tNULL\n",
    ],
)
def test_tables_that_both_read(
    content: str, folder: Path, tmp_path: Path, script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "table.csv"
    file.write_bytes(content.encode())
    main(["predict", str(folder / "filled"), "--client", "a", str(file), "--json"])
    told = [one["classes"] for one in json.loads(capsys.readouterr().out)]
    best = [max(classes, key=lambda one: one["probability"]) for classes in told]
    shown = [line.split() for line in script("filled", file).splitlines()]
    assert [name for name, _ in shown] == [one["name"] for one in best]
    assert [float(p) for _, p in shown] == pytest.approx([one["probability"] for one in best], abs=1e-3)


@pytest.mark.parametrize(
    ("model", "content", "says"),
    [
        ("whole", "50,1,mild\nnan,1,none\n", "line 3: column 'age': a missing value, which training did not have"),
        ("whole", "50,?,none\n", "line 2: column 'crp': a missing value, which training did not have"),
        ("filled", "50,inf,none\n", "line 2: column 'crp': inf, which training did not have"),
        ("whole", "1e39,1,none\n", "line 2: column 'age': inf, which training did not have"),
        ("whole", "fifty,1,none\n", "line 2: column 'age': 'fifty' is not a number"),
        ("whole", "50,1,awful\n", "line 2: column 'pain': 'awful' is not one of 2, mild, none"),
        ("filled", "50,1,3\n", "line 2: column 'pain': '3' is not one of 2, mild, none"),
        ("whole", "50,1\n", "line 2: 2 values for 3 columns"),
        ("whole", "", "samples are float32 (0,); the model takes float32 ['batch', 3]"),
    ],
)
def test_tables_that_both_refuse(
    model: str, content: str, says: str, folder: Path, tmp_path: Path, script: Script
) -> None:
    file = tmp_path / "table.csv"
    file.write_text(HEADER + content)
    with pytest.raises(SystemExit) as left:
        main(["predict", str(folder / model), "--client", "a", str(file)])
    assert left.value.code == 2
    with pytest.raises(ValueError, match=r".") as refused:
        script(model, file)
    assert str(refused.value).endswith(says)


def test_arrays_that_are_refused(tmp_path: Path, script: Script) -> None:
    np.save(tmp_path / "gap.npy", np.array([[50, 1, 0], [np.nan, 1, 0]], np.float32))
    np.save(tmp_path / "code.npy", np.array([[50, 1, 3]], np.float32))
    np.save(tmp_path / "objects.npy", np.array([{}], object), allow_pickle=True)
    (tmp_path / "short.csv").write_text("age,pain\n50,none\n")
    (tmp_path / "latin.csv").write_bytes("age,crp,pain\n50,1,gravität\n".encode("latin1"))
    Image.new("RGB", (4, 4)).save(tmp_path / "scan.png")
    for name, says in (
        ("gap.npy", "sample 1: column 'age': a missing value"),
        ("code.npy", "sample 0: column 'pain': 3.0, which"),
        ("objects.npy", "cannot be read; give a .csv table in UTF-8 or a .npy array"),
        ("short.csv", "line 1: column 'crp' must be there once; found: age, pain"),
        ("latin.csv", "cannot be read; give a .csv table in UTF-8"),
        ("scan.png", "cannot be read; give a .csv table in UTF-8 or a .npy array"),
        ("none.csv", "No such file or directory"),
        ("", "Is a directory"),
    ):
        with pytest.raises(ValueError, match=r".") as refused:
            script("whole", tmp_path / name)
        assert says in str(refused.value)
        assert "pickle" not in str(refused.value)
        assert len(str(refused.value).splitlines()) == 1


def test_an_answer_is_a_number(tmp_path: Path, script: Script) -> None:
    """Numbers far outside the training data overflow in the network."""
    np.save(tmp_path / "huge.npy", np.array([[50, 1, 0], [3e38, 3e38, 0]], np.float32))
    with pytest.raises(ValueError, match=r"^sample 1: the model's output is not finite$"):
        script("whole", tmp_path / "huge.npy")


def test_a_script_without_its_model(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = shutil.copy(folder / "whole.predict.py", tmp_path / "a.predict.py")
    monkeypatch.setattr(sys, "argv", ["a.predict.py", "x.npy"])
    with pytest.raises(SystemExit, match=r"a\.onnx"):
        runpy.run_path(str(alone), run_name="__main__")
