"""Files that are there whole or not at all, whatever happens while they are written."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from coterie.core.errors import CoterieError


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A path to write to. What is written takes the place of `path` once it is safe on the disk, or never."""
    part = path.with_name(f"{path.name}.part")
    try:
        yield part
        sync(part)
        os.replace(part, path)
        sync(path.parent)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Wait until the disk has it: the content of a file, or the names in a folder."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def sync_all(paths: Sequence[Path]) -> None:
    """The same for many: one call writes all that waits, and those for each find nothing left but errors to tell."""
    if hasattr(os, "sync"):
        os.sync()
    for path in paths:
        sync(path)


def lock(path: Path) -> IO[Any]:
    """Keep other processes away until this file is closed, or this process is dead."""
    try:
        file = path.open("r+b")
    except OSError as error:
        raise CoterieError(f"{path.parent} cannot be written to: {error.strerror}") from None
    if sys.platform != "win32":
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise CoterieError(f"another process is at work in {path.parent}; let it end, or stop it first") from None
        except OSError:
            pass  # a file system without locks
    return file
