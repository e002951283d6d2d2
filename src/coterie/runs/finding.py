"""Find run folders and open them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from itertools import chain, count, groupby
from pathlib import Path

from coterie.analysis.outcomes import place, reference
from coterie.core.errors import CoterieError
from coterie.runs.stored_run import StoredRun

DEEP = 3  # levels of folders in which runs are searched
MOST_FOLDERS = 2000  # other folders that are searched


def open_run(path: str | Path) -> StoredRun:
    """Open a run that may be unfinished or damaged, to report how it went. A modified file is an error."""
    run = StoredRun(path)
    run.files.verify()
    return run


def open_runs(paths: Iterable[str | Path]) -> list[StoredRun]:
    """The runs in these folders, each once. A folder of runs, as `coterie compare` leaves, stands for all of them."""
    found: dict[Path, StoredRun] = {}
    for path in map(Path, paths):
        for run in runs_of(path):
            found.setdefault(run.folder.resolve(), run)
    return list(found.values())


def runs_of(path: Path) -> list[StoredRun]:
    """The runs in one folder; those of a comparison in its order, with its reference."""
    runs = [open_run(folder) for folder in run_folders(path)]
    if is_run(path):
        return runs
    ordered = [
        run
        for _, inside in groupby(runs, key=lambda run: run.folder.parent)
        for run in sorted(inside, key=lambda run: place(run.section("command")))
    ]
    for run in ordered:
        run.reference = reference(run.section("command"))
    return ordered


def run_folders(path: Path) -> list[Path]:
    if not path.exists():
        raise CoterieError(f"{path}: no such folder; give a folder that `coterie run --out` made")
    if not path.is_dir():
        raise CoterieError(f"{path} is a file; give a run folder")
    if is_run(path):
        return [path]
    found = list(runs_below(path))
    if not found:
        raise CoterieError(
            f"{path} is not a run folder: it has no config.json and no metrics.csv, and the {DEEP} levels of folders "
            "below it hold no runs"
        )
    return found


def runs_below(top: Path) -> Iterator[Path]:
    """Run folders by name, a few levels deep. Links and hidden folders are skipped."""
    level, searched = [top], 0
    for _ in range(DEEP):
        inner: list[Path] = []
        for folder in level:
            searched += 1
            if searched > MOST_FOLDERS:
                raise CoterieError(f"{top} has more than {MOST_FOLDERS} folders that are not runs; name one with runs")
            below = folders_in(folder, must=folder == top)
            yield from filter(is_run, below)
            inner += [path for path in below if not is_run(path)]
        level = inner


def folders_in(path: Path, must: bool) -> list[Path]:
    """must: raise an error if the folder cannot be read."""
    try:
        with os.scandir(path) as entries:
            names = [e.name for e in entries if e.is_dir(follow_symlinks=False) and not e.name.startswith(".")]
    except OSError as error:
        if must:
            raise CoterieError(f"{path} cannot be read: {error.strerror}") from None
        return []
    return [path / name for name in sorted(names)]


def is_run(path: Path) -> bool:
    try:
        return (path / "config.json").is_file() or (path / "metrics.csv").is_file()
    except OSError:  # no permission to search it
        return False


def is_started(path: Path) -> bool:
    """Whether a run began in this folder, so that it can be resumed."""
    return os.path.lexists(path / "config.json")


def started_in(path: Path) -> list[Path]:
    """The runs of a comparison, or of another folder of runs."""
    return [folder for folder in folders_in(path, must=False) if is_started(folder)]


def is_complete(path: Path) -> bool:
    """Whether a run wrote its result, which comes last."""
    return os.path.lexists(path / "result.json")


def new_folder(name: str) -> Path:
    """The default folder of what starts now: runs/TIME-NAME, numbered where this second already has one."""
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    names = chain([stem], (f"{stem}-{number}" for number in count(2)))
    return next(path for path in (Path("runs") / name for name in names) if not os.path.lexists(path))


def discard_unstarted(path: Path) -> None:
    """Delete what a run left that was killed while it made its folder."""
    if path.is_dir() and not is_started(path):
        (path / "config.json.part").unlink(missing_ok=True)
        path.rmdir()
