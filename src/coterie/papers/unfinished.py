"""Trainings that a time limit cut off: their run folders, from which the next call continues."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coterie.federation import History, Round
from coterie.papers.results import Unwritable
from coterie.runs.disk import subfolder
from coterie.runs.finding import is_started

UNFINISHED = "unfinished"  # in the folder of results
AT_LEAST = 1.0  # seconds that a training gets once it has started


def place(folder: Path, name: str) -> Path:
    """The run folder of a training. One that was cut off before its configuration was written is removed."""
    try:
        path = subfolder(folder, UNFINISHED) / name
        if path.exists() and not is_started(path):
            remove(path)
    except OSError as error:
        raise Unwritable(f"cannot use {folder / UNFINISHED}: {error.strerror}") from None
    return path


def continuing(path: Path, deadline: float | None) -> dict[str, Any]:
    """Settings of `execute` for this run folder; none if there is no deadline and nothing to continue."""
    limit = {} if deadline is None else {"max_time": max(deadline - time.time(), AT_LEAST)}
    return limit | ({"out": path, "resume": path.exists()} if limit or path.exists() else {})


def earlier(history: History, made: Sequence[Round]) -> float:
    """Seconds of the rounds that earlier calls made."""
    return sum(sum(record.seconds.values()) for record in list(history)[: len(history) - len(made)])


def remove(folder: Path) -> None:
    """Delete a run folder, if there is one."""
    shutil.rmtree(folder, ignore_errors=True)
