"""Tests that cannot run here are skipped with a reason; in CI, where every program is installed, that is an error."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Generator
from typing import TypeVar

import pytest

from tests.browser import PROGRAM

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)

MISSING = {  # marker: why its tests cannot run
    "browser": "" if PROGRAM else "chromium is not installed: apt-get install chromium",
    "ray": "" if importlib.util.find_spec("ray") else "ray is not installed: pip install 'coterie[ray]'",
}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, reason in MISSING.items():
        if reason and item.get_closest_marker(marker):
            pytest.skip(reason)


def strict(report: Report) -> Report:
    """With CI=true, as in .ci/run, a skipped test is a failed one."""
    if os.environ.get("CI") == "true" and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome, report.longrepr = "failed", f"no test may be skipped with CI=true. {reason}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return strict((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return strict((yield))
