"""What to do where `out` exists already: an error, resume what is there, or replace it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from coterie.core.errors import CoterieError, unknown
from coterie.runs.finding import discard_unstarted, started_in
from coterie.runs.replacing import check_resumable, replacing

EXIST = ("error", "resume", "replace")


class Place(NamedTuple):
    """Where a run or comparison writes."""

    folder: Path | None
    resume: bool  # the folder exists, and its run continues


def check_free(out: str | Path | None, exist: str) -> None:
    """Raise an error for a folder that exists where that is not allowed."""
    if exist == "error" and out is not None and os.path.lexists(out):
        raise CoterieError(f"{out} exists already; name another folder, or pass exist='resume' or exist='replace'")


@contextmanager
def prepared(out: str | Path | None, exist: str = "error", track: str | Sequence[str] = ()) -> Iterator[Place]:
    """The folder to write to. A replacement takes the place of `out` when the block ends without an error."""
    if exist not in EXIST:
        raise unknown("value of exist", str(exist), EXIST)
    if out is None:
        if exist != "error":
            raise CoterieError(f"exist='{exist}' needs a run folder: pass one as `out`")
        yield Place(None, False)
        return
    check_free(out, exist)
    path = Path(out)
    there = os.path.lexists(path)
    if exist == "replace" and there:
        if "mlflow" in (track if not isinstance(track, str) else track.split(",")):
            raise CoterieError("exist='replace' cannot be combined with mlflow, which records the path of the folder")
        with replacing(path) as new:
            yield Place(new, False)
    elif exist == "resume" and there:
        check_resumable(path)
        if not started_in(path):
            discard_unstarted(path)
        yield Place(path, path.exists())
    else:
        yield Place(path, False)


def check_members(base: Path, expected: Sequence[Path]) -> None:
    """Raise an error for runs in the folder of a comparison that are not part of it."""
    others = [path.name for path in started_in(base) if path not in expected]
    if others:
        raise CoterieError(
            f"{base} holds runs that are not part of this comparison ({', '.join(others[:3])}); name another folder, "
            "or replace it (exist='replace', --exist replace)"
        )
