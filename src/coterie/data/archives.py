"""Unpack archives: regular files and folders only, nothing outside the folder, no bombs."""

from __future__ import annotations

import errno
import lzma
import os
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

from coterie.core.errors import CoterieError

ENDINGS = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2")
MOST_RATIO = 200  # unpacked bytes for each byte of the archive
ALLOWANCE = 2**26  # bytes that any archive may take
MOST_ENTRIES = 5_000_000
BLOCK = 2**20


class Entry(NamedTuple):
    name: str
    size: int
    open: Callable[[], IO[bytes] | None] | None  # None: a folder


def is_archive(path: Path) -> bool:
    """By its name, or by its content if it was downloaded under another name."""
    return path.name.lower().endswith(ENDINGS) or zipfile.is_zipfile(path) or tarfile.is_tarfile(path)


def unpack_archive(path: Path, folder: Path) -> None:
    """Unpack into a new folder."""
    room = min(max(ALLOWANCE, MOST_RATIO * path.stat().st_size), shutil.disk_usage(path.parent).free)
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                extract(zip_entries(archive, path), folder, room, path)
        else:
            with tarfile.open(path) as bundle:
                extract(tar_entries(bundle, path), folder, room, path)
    except (
        tarfile.TarError,
        zipfile.BadZipFile,
        zlib.error,
        lzma.LZMAError,
        EOFError,
        ValueError,
        RuntimeError,
    ) as error:
        raise CoterieError(f"{path}: damaged or not an archive ({first_line(error)})") from error
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise CoterieError(f"{folder.parent}: no space left to unpack {path.name}") from None
        raise CoterieError(f"{path}: cannot be unpacked ({error.strerror or error})") from error


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def extract(entries: Iterator[Entry], folder: Path, room: int, archive: Path) -> None:
    folder.mkdir(parents=True)
    for number, entry in enumerate(entries):
        target = folder / safe(entry.name, archive)
        if number >= MOST_ENTRIES or entry.size > room:
            raise CoterieError(f"{archive}: unpacks to more than {MOST_RATIO} times its size, or than there is space")
        if entry.open is None:
            target.mkdir(parents=True, exist_ok=True)
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("xb") as file:
            source = entry.open()
            assert source is not None
            with source:
                while block := source.read(BLOCK):  # counts real bytes: a header may lie
                    room -= len(block)
                    if room < 0:
                        raise CoterieError(
                            f"{archive}: unpacks to more than {MOST_RATIO} times its size, or than there is space"
                        )
                    file.write(block)


def safe(name: str, archive: Path) -> Path:
    """A path inside the folder."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\\" in name or "\0" in name or ":" in parts[0]:
        raise CoterieError(f"{archive}: '{name[:80]}' is outside of its folder")
    return Path(*parts)


def zip_entries(archive: zipfile.ZipFile, path: Path) -> Iterator[Entry]:
    for info in archive.infolist():
        mode = info.external_attr >> 16
        if mode and not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_IFMT(mode) == 0):
            raise CoterieError(f"{path}: '{info.filename[:80]}' is a link or a device")
        yield Entry(info.filename, info.file_size, None if info.is_dir() else partial(archive.open, info))


def tar_entries(archive: tarfile.TarFile, path: Path) -> Iterator[Entry]:
    for info in archive:
        if info.name == "." and info.isdir():
            continue
        if not (info.isfile() or info.isdir()):
            raise CoterieError(f"{path}: '{info.name[:80]}' is a link or a device")
        yield Entry(info.name, info.size, None if info.isdir() else partial(archive.extractfile, info))


def walk(folder: Path, depth: int) -> Iterator[Path]:
    """A folder and those inside it, nearest first."""
    level = [folder]
    for _ in range(depth + 1):
        yield from level
        level = [
            Path(entry.path)
            for each in level
            for entry in sorted(os.scandir(each), key=lambda e: e.name)
            if entry.is_dir(follow_symlinks=False)
        ]
