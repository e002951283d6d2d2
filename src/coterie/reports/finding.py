"""Where the folders of runs are, below one that is named."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from coterie.core.errors import CoterieError

DEEP = 3  # levels of folders in which runs are looked for
MOST_FOLDERS = 2000  # that are no runs and are looked into


def run_folders(path: Path) -> list[Path]:
    if not path.exists():
        raise CoterieError(f"{path}: no such folder; give the folder that `coterie run --out` left")
    if not path.is_dir():
        raise CoterieError(f"{path} is a file; give the folder of a run")
    if is_run(path):
        return [path]
    found = list(runs_below(path))
    if not found:
        raise CoterieError(
            f"{path} is not the folder of a run, it has no config.json and no metrics.csv; nor is there one in the "
            f"{DEEP} levels of folders below it"
        )
    return found


def runs_below(top: Path) -> Iterator[Path]:
    """Run folders in order of their names. Other folders are looked into, a few levels deep; links are not."""
    level, looked = [top], 0
    for _ in range(DEEP):
        inner: list[Path] = []
        for folder in level:
            looked += 1
            if looked > MOST_FOLDERS:
                raise CoterieError(
                    f"{top} has more than {MOST_FOLDERS} folders that are no runs; name the folder that holds the runs"
                )
            below = folders_in(folder, must=folder == top)
            yield from filter(is_run, below)
            inner += [path for path in below if not is_run(path)]
        level = inner


def folders_in(path: Path, must: bool) -> list[Path]:
    """must: that it cannot be read is an error."""
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
    except OSError:  # nobody may look into it
        return False
