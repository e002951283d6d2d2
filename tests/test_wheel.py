"""What `pip install` of the built wheel gives: an environment with nothing else in it, far from the source tree."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from coterie.core.version import VERSION

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "coterie"
pytestmark = pytest.mark.wheel


def call(*command: str | Path, cwd: Path, timeout: int = 1200) -> str:
    """Its output. No variable points to the source tree, and there is no home."""
    kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_") or name == "PATH"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=kept, timeout=timeout, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What belongs to the package; an old build folder would lend it files that are gone."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    shutil.copytree(SOURCE, tree / "src" / "coterie", ignore=shutil.ignore_patterns("__pycache__"))
    return tree


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    call(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", out, tree, cwd=out)
    (built,) = out.glob("*.whl")
    return built


def test_what_would_be_uploaded(tree: Path, tmp_path: Path) -> None:
    """The sdist and the wheel that is built from it, as the release workflow makes them."""
    call(sys.executable, "-m", "build", "--outdir", tmp_path, tree, cwd=tmp_path)
    sdist, built = tmp_path / f"coterie-{VERSION}.tar.gz", tmp_path / f"coterie-{VERSION}-py3-none-any.whl"
    assert set(tmp_path.iterdir()) == {sdist, built}
    shown = call(sys.executable, "-m", "twine", "check", "--strict", sdist, built, cwd=tmp_path)
    assert shown.count("PASSED") == 2
    with tarfile.open(sdist) as archive:
        held = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {"LICENSE", "README.md", "pyproject.toml", "src/coterie/py.typed", "src/coterie/report/report.js"} <= held


def test_all_extras_resolve_together(tree: Path, tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--ignore-installed", "--report", "-"]
    constraint = ["--constraint", str(ROOT / "constraints.txt")]
    report = json.loads(call(*pip, *constraint, f"{tree}[all]", cwd=tmp_path))
    names = {found["metadata"]["name"].lower() for found in report["install"]}
    assert {"ray", "paho-mqtt", "peft", "onnx", "optuna", "tenseal", "matplotlib", "wandb", "mlflow-skinny"} <= names
    assert "flwr" not in names


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Programs of an environment that has the wheel and what it asks for."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt"]
    call(*pip, wheel, cwd=folder)
    return folder / "bin"


def test_the_wheel_holds_all_files_of_the_package(wheel: Path) -> None:
    held = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("coterie/")}
    there = {
        str(Path("coterie") / path.relative_to(SOURCE))
        for path in SOURCE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert held == there
    assert {"coterie/py.typed", "coterie/report/report.css", "coterie/report/report.js"} <= held
    recipes, others = 90 + 1, 3  # tables, figures and the demo; readings, noise and the leaderboard
    assert len([name for name in held if name.endswith(".yaml")]) == recipes + others


def test_only_what_is_asked_for_is_installed(installed: Path, tmp_path: Path) -> None:
    listed = json.loads(call(installed / "python", "-m", "pip", "list", "--format", "json", cwd=tmp_path))
    names = {package["name"].lower() for package in listed}
    assert {"coterie", "torch", "numpy", "safetensors", "rich", "pyyaml"} <= names
    assert not names & {"pytest", "pillow", "pyarrow", "ray", "onnx", "hypothesis"}
    where = call(installed / "python", "-c", "import coterie; print(coterie.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(installed.parent)


def test_the_demo_and_its_report(installed: Path, tmp_path: Path) -> None:
    coterie = installed / "coterie"
    assert call(coterie, "--version", cwd=tmp_path).strip() == VERSION
    assert "P1-T1-CIFAR10-20" in call(coterie, "recipes", "cifar10", "--json", cwd=tmp_path)
    table = json.loads(call(coterie, "demo", "--json", "--out", "demo", cwd=tmp_path))
    accuracy = {outcome["method"]: outcome["mean"] for outcome in table["outcomes"]}
    assert accuracy["FedPAC"] > accuracy["Local"] > accuracy["FedAvg"]
    call(coterie, "report", "demo", "--out", "demo.html", cwd=tmp_path)
    assert "FedAvg-FT" in (tmp_path / "demo.html").read_text(encoding="utf-8")
    models = json.loads(call(coterie, "models", "demo/fedpac-seed0", "--json", cwd=tmp_path))
    assert len(models) == 20
    call(coterie, "export", "demo/fedpac-seed0", "--client", "3", "--to", "safetensors", cwd=tmp_path)
    assert (tmp_path / "client-3.safetensors").stat().st_size > 100_000
