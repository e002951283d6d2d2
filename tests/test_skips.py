"""The rules of tests/skips.py, in a pytest of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS = """
import pytest
from tests import skips

skips.MISSING["browser"] = "no chromium here"

def test_that_runs():
    pass

def test_that_needs_a_broker():
    pytest.skip("no mosquitto here")

@pytest.mark.browser
def test_that_needs_a_browser():
    raise AssertionError

@pytest.mark.xfail
def test_that_is_known_to_fail():
    raise AssertionError
"""
REASONS = ("no mosquitto here", "no chromium here", "could not import 'not_a_module'")


def pytest_says(folder: Path, ci: str) -> tuple[int, str]:
    (folder / "test_some.py").write_text(TESTS)
    (folder / "test_module.py").write_text("import pytest\npytest.importorskip('not_a_module')\n")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = browser\n")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-rs", "-p", "tests.skips", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "--continue-on-collection-errors"],
        cwd=folder, env=os.environ | {"PYTHONPATH": path, "CI": ci}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def test_what_cannot_run_is_skipped_and_named(tmp_path: Path) -> None:
    code, said = pytest_says(tmp_path, ci="")
    assert code == 0, said
    assert "1 passed, 3 skipped, 1 xfailed" in said
    assert all(reason in said for reason in REASONS), said


def test_nothing_is_skipped_in_ci(tmp_path: Path) -> None:
    code, said = pytest_says(tmp_path, ci="true")
    assert code == 1, said
    assert "1 failed, 1 passed, 1 xfailed, 2 errors" in said
    assert said.count("no test may be skipped with CI=true") >= 3
    assert all(reason in said for reason in REASONS), said
