"""The CPU time of each test, child processes included: `python -m pytest -p tests.cpu_times tests/runs`.

Unlike `--durations` this does not depend on what else the machine is doing. A shared fixture counts for the first test
that uses it.
"""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest

SECONDS: dict[str, float] = {}  # of each test: set-up, call and tear-down


def cpu_seconds() -> float:
    """Of this process and of the children it has waited for."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu-times-to",
        metavar="FILE",
        type=Path,
        help="append CPU seconds, wall seconds and name of each test to FILE",
    )


def measured(item: pytest.Item) -> Generator[None, object, object]:
    start = cpu_seconds()
    try:
        return (yield)
    finally:
        item.user_properties.append(("cpu seconds", cpu_seconds() - start))  # reaches the reports of pytest-xdist too


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from measured(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from measured(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from measured(item))


class Totals:
    """Collects the times where reports arrive: in the only process, or in the one that leads the others."""

    def __init__(self, config: pytest.Config) -> None:
        self.file: Path | None = config.getoption("cpu_times_to")
        self.wall: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.wall[report.nodeid] += report.duration
        if report.when != "teardown":
            return
        seconds = sum(float(str(value)) for name, value in report.user_properties if name == "cpu seconds")
        SECONDS[report.nodeid] = seconds
        if self.file is not None:
            with self.file.open("a") as lines:
                lines.write(f"{seconds:.2f}\t{self.wall[report.nodeid]:.2f}\t{report.nodeid}\n")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section(f"CPU seconds: {sum(SECONDS.values()):.0f} in {len(SECONDS)} tests")
        for name, seconds in sorted(SECONDS.items(), key=lambda each: -each[1])[:30]:
            terminalreporter.write_line(f"{seconds:7.2f}  {name}")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Totals(config))
