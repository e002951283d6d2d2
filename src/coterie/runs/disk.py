"""Files of a run folder: written atomically, opened without following links.

A run folder may come from a stranger. The folder itself may be a link, since the user named it; everything inside must
be a plain file or folder. Links, pipes and devices inside are refused: nothing is written or deleted through them.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import IO, Any

from coterie.core.errors import CoterieError

NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
NO_WAIT = getattr(os, "O_NONBLOCK", 0)  # opening a pipe must not block
FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)
FLAGS = {
    "rb": os.O_RDONLY,
    "r+b": os.O_RDWR,
    "w+b": os.O_RDWR | os.O_CREAT,  # created if missing, else kept
    "ab": os.O_WRONLY | os.O_APPEND | os.O_CREAT,
    "xb": os.O_WRONLY | os.O_CREAT | os.O_EXCL,
}
STRANGE = (errno.ELOOP, errno.EMLINK, errno.ENXIO, errno.ENOTDIR, errno.EISDIR, errno.ENODEV)


class Foreign(CoterieError):
    """Something in a run folder is a link, a pipe or a device."""

    def __init__(self, path: Path, what: str = "is a link, or not a plain file") -> None:
        super().__init__(f"{path} {what}; Coterie uses only plain files and folders inside a run folder")


def open_inside(folder: Path, name: str, mode: str = "rb") -> IO[bytes]:
    """Open a plain file of a folder. name: may have folders in it, none of which may be a link."""
    path = folder / name
    try:
        file = _descend(folder, PurePath(name).parts, FLAGS[mode] | NO_FOLLOW | NO_WAIT)
    except OSError as error:
        if folder.is_file():
            raise CoterieError(f"{folder} is a file, not a run folder") from None
        if error.errno in STRANGE:
            raise Foreign(path) from None
        error.filename = str(path)
        raise
    about = os.fstat(file)
    if not stat.S_ISREG(about.st_mode):
        os.close(file)
        raise Foreign(path)
    if mode in ("w+b", "ab") and about.st_nlink > 1:
        os.close(file)
        raise Foreign(path, "has a second name somewhere (a hard link)")
    return open(file, {"w+b": "r+b", "xb": "wb"}.get(mode, mode))


def _descend(folder: Path, parts: Sequence[str], flags: int) -> int:
    """Open the last part without following links; returns a file descriptor."""
    if os.open not in os.supports_dir_fd:
        inner = [folder.joinpath(*parts[: i + 1]) for i in range(len(parts))]
        if any(path.is_symlink() for path in inner):
            raise OSError(errno.ELOOP, "a link")
        return os.open(inner[-1], flags, 0o666)
    place = os.open(folder, FOLDER)
    try:
        for part in parts[:-1]:
            below = os.open(part, FOLDER | NO_FOLLOW, dir_fd=place)
            os.close(place)
            place = below
        return os.open(parts[-1], flags, 0o666, dir_fd=place)
    finally:
        os.close(place)


def read_inside(folder: Path, name: str) -> bytes:
    """The content of a plain file of a folder."""
    with open_inside(folder, name) as file:
        return file.read()


def same_file(file: IO[bytes], path: Path) -> str:
    """A path that leads to this open file and no other, for a library that opens files itself."""
    own = f"/proc/self/fd/{file.fileno()}"
    return own if os.path.exists(own) else str(path)


def subfolder(folder: Path, name: str, make: bool = False) -> Path:
    """The path of a folder inside another; `Foreign` if it is a link. make: create it if missing."""
    path = folder / name
    if make:
        path.mkdir(exist_ok=True)
    try:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise Foreign(path, "is a link, or not a folder")
    except FileNotFoundError:
        pass
    return path


def check_tree(folder: Path) -> None:
    """Raise `Foreign` for the first link, pipe or device in a folder, at any depth."""
    waiting = [folder]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(Path(entry.path))
                elif not entry.is_file(follow_symlinks=False):
                    raise Foreign(Path(entry.path))


@contextmanager
def whole(path: Path, shared: bool = False) -> Iterator[Path]:
    """Write a file atomically: yield a temporary path, which replaces `path` once its content is on the disk.

    shared: other processes may write `path` at the same time; the last one wins.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}.part" if shared else f"{path.name}.part")
    part.unlink(missing_ok=True)  # left by a process that was killed, or a link
    try:
        yield part
        sync(part)
        os.replace(part, path)
        sync(path.parent)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn file-system errors in this block into one that names the path."""
    try:
        yield
    except OSError as error:
        raise CoterieError(f"{path} cannot be written to: {error.strerror}") from None


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    file = os.open(path, os.O_RDONLY | NO_WAIT)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def sync_all(paths: Sequence[Path]) -> None:
    """The same for many files: flush everything at once, then check each file for errors."""
    if hasattr(os, "sync"):
        os.sync()
    for path in paths:
        sync(path)


def check_ours(path: Path, mark: bytes) -> None:
    """Raise an error for a file that is not empty and lacks the mark of those that Coterie writes under this name."""
    if path.is_file() and path.stat().st_size and mark not in path.read_bytes():
        raise CoterieError(f"{path} exists already and was not written by Coterie; name another file, or remove it")


def lock(path: Path) -> IO[Any]:
    """Lock out other processes until the returned file is closed or this process ends."""
    with writing(path.parent):
        file = open_inside(path.parent, path.name, "r+b")
    if sys.platform != "win32":
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise CoterieError(f"another process is using {path.parent}; wait for it, or stop it first") from None
        except OSError:
            pass  # a file system without locks
    return file
