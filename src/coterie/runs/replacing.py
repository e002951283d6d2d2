"""Folders that exist already: what a run or comparison may replace, and the replacement itself."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from coterie.core.errors import CoterieError
from coterie.runs.checksums import CHECKSUMS
from coterie.runs.disk import check_tree, lock, writing
from coterie.runs.finding import folders_in, is_started, started_in

log = logging.getLogger("coterie")
OF_A_RUN = {
    "config.json", "metrics.csv", "clients.csv", "evaluation.csv", "confusion.csv", "classes.csv", "partition.npz",
    "partition.svg", "models", "reports.npz", "result.json", "log.txt", "checkpoint", CHECKSUMS, "tensorboard", "wandb",
    "mlruns", "tracking.json",
}  # fmt: skip
OF_A_COMPARISON = {"command.json", "compare.json"}  # next to its runs
NEW, OLD = ".new", ".old"  # endings of the folders of a replacement


def check_replaceable(path: Path) -> None:
    """Raise an error unless everything in the folder was written by a run or a comparison."""
    if path.is_symlink() or not path.is_dir():
        raise CoterieError(f"{path} is a link or a file, not a run folder, and is not replaced")
    check_tree(path)
    runs = [path] if is_started(path) else started_in(path)
    if not runs:
        raise CoterieError(f"{path} is not the folder of a run or comparison, and is not replaced; name another one")
    known = OF_A_RUN if runs == [path] else OF_A_COMPARISON | {run.name for run in runs}
    check_names(path, known)
    for run in runs:
        check_names(run, OF_A_RUN)


def check_names(folder: Path, known: set[str]) -> None:
    for name in sorted(os.listdir(folder)):
        if name.removesuffix(".part") not in known:  # left by a process that was killed
            raise CoterieError(f"{folder} holds {name}, which no run wrote, so it is not replaced; move it away first")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new folder next to `path`, which takes its place if the block succeeds; otherwise `path` stays as it is.

    What an interrupted block leaves in the new folder is kept there until the next replacement.
    """
    new, old = (path.with_name(f"{path.name}{ending}") for ending in (NEW, OLD))
    check_replaceable(path)
    for left in (new, old):
        if os.path.lexists(left):
            check_replaceable(left)
    with locked(new), writing(new):
        if new.exists():
            shutil.rmtree(new)
    with locked(path):
        yield new
        check_replaceable(new)
        with writing(path):
            if old.exists():
                shutil.rmtree(old)
            os.rename(path, old)
            try:
                os.rename(new, path)
            except OSError:
                os.rename(old, path)
                raise
        try:
            check_replaceable(old)  # again: files may have been added during training
            shutil.rmtree(old)
        except (CoterieError, OSError) as error:
            log.warning("the replaced folder is kept in %s: %s", old, error)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock out other processes from the runs in this folder."""
    with ExitStack() as held:
        runs = [path] if is_started(path) else started_in(path) if path.is_dir() else []
        for run in runs:
            held.enter_context(lock(run / "config.json"))
        yield


def check_resumable(path: Path) -> None:
    """Raise an error for a folder that is not empty and in which no run began."""
    if path.is_dir() and not is_started(path) and not started_in(path):
        foreign = [name for name in os.listdir(path) if name != "config.json.part"]
        if foreign or folders_in(path, must=False):
            raise CoterieError(f"{path} is not the folder of a run, so there is nothing to resume; name another one")
