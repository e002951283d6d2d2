"""`coterie data get`: download or take an archive, verify it, and put it where the reader looks."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

from coterie.core.errors import CoterieError
from coterie.data.archives import ENDINGS, is_archive, unpack_archive, walk
from coterie.data.datasets import DATASETS, found_in, known_as, roots
from coterie.data.publishers import PUBLICATIONS, RemoteFile
from coterie.data.schools import PACKAGE, from_package
from coterie.data.transfer import Show, check_space, digest, download

WORKING = ".getting-"  # folders of downloads that are in progress
DEPTH = 4  # folders of an archive that are searched

Say = Callable[[str], None]


def get(name: str, data_dir: str | None = None, source: str | None = None, *, say: Say, show: Show) -> Path:
    """Get a dataset; returns the folder that has its files.

    source: URL or path of a mirror: an archive, or a folder with the publisher's files. Default: the publisher.
    """
    known = known_as(name)
    if known not in PUBLICATIONS:
        raise CoterieError(f"{known} is included; there is nothing to get")
    publication, root = PUBLICATIONS[known], root_of(data_dir)
    say(f"license: {publication.license}")
    say(f"cite: {publication.citation}")
    if source is None and not publication.files:
        raise CoterieError(f"{known} cannot be downloaded automatically: {publication.manual} with --from PATH")
    place = root / DATASETS[known].folders[0]
    if found_in(known, place):
        say(f"{known} is already in {place}")
        return place
    if place.exists():
        raise CoterieError(f"{place}: exists, but is not complete; rename or delete it first")
    make(root)
    with working_folder(root) as work:
        if source == PACKAGE and known == "schools":
            from_package(work)
            files = work
        elif source is not None and not is_url(source):
            files = local(Path(os.path.expanduser(source)), publication.files, work, say)
        else:
            remotes = mirrored(publication.files, source)
            files = fetched(remotes, root / ".downloads" / known, work, say, show)
        complete = searched(known, files)
        place.parent.mkdir(parents=True, exist_ok=True)
        if complete.is_relative_to(work):
            os.rename(complete, place)
        else:  # a folder of the user's, which stays
            copied(complete, work / "copy", place)
    shutil.rmtree(root / ".downloads" / known, ignore_errors=True)
    return place


def root_of(data_dir: str | None) -> Path:
    found = roots(data_dir)
    if not found:
        raise CoterieError("there is no home directory; set --data-dir or COTERIE_DATA")
    return found[0]


def make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CoterieError(f"{folder}: cannot be created ({error.strerror})") from None


@contextmanager
def working_folder(root: Path) -> Iterator[Path]:
    """A folder on the same disk, removed at the end; what is complete is moved out of it in one step.

    Those of processes that were killed are removed first: their locks are free.
    """
    with ExitStack() as held:
        try:
            with locked(root, wait=True):
                for left in root.glob(f"{WORKING}*"):
                    with locked(left) as free:
                        if free:
                            shutil.rmtree(left, ignore_errors=True)
                work = Path(tempfile.mkdtemp(prefix=WORKING, dir=root))
                held.callback(shutil.rmtree, work, ignore_errors=True)
                held.enter_context(locked(work))
        except OSError as error:
            raise CoterieError(f"{root}: cannot be written ({error.strerror})") from None
        yield work


@contextmanager
def locked(folder: Path, wait: bool = False) -> Iterator[bool]:
    """Lock a folder for other processes. Whether it was free; False where there are no locks."""
    if sys.platform == "win32":
        yield False
        return
    import fcntl

    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError:  # it is in use, or a file system without locks
            yield False
        else:
            yield True
    finally:
        os.close(handle)


def is_url(source: str) -> bool:
    return source.lower().startswith(("http://", "https://"))


def file_name(url: str) -> str:
    return Path(unquote(urlsplit(url).path)).name or "download"


def mirrored(files: Sequence[RemoteFile], source: str | None) -> list[RemoteFile]:
    """The same files at another address: of the archive, or, for several files, of the folder they are in."""
    if source is None:
        return list(files)
    if len(files) > 1:
        return [RemoteFile(f"{source.rstrip('/')}/{file_name(file.url)}", file.checksum) for file in files]
    return [RemoteFile(source, files[0].checksum if files else "")]


def fetched(remotes: Sequence[RemoteFile], cache: Path, work: Path, say: Say, show: Show) -> Path:
    """Download files, which stay in `cache` until all are complete; archives are unpacked."""
    for remote in remotes:
        path = cache / file_name(remote.url)
        if path.exists():  # from a command that was interrupted before all files were there
            found = digest(path, remote.checksum.partition(":")[0] or "sha256")
            if remote.checksum and found != remote.checksum:
                path.unlink()
        if not path.exists():
            say(f"from: {remote.url}")
            found = download(remote.url, path, remote.checksum, show)
        verified(path.name, found, remote.checksum, say)
    return unpacked([cache / file_name(remote.url) for remote in remotes], work)


def verified(name: str, found: str, expected: str, say: Say) -> None:
    say(f"{name}: {found}, " + ("as published" if expected else "not verified: the publisher gives no checksum"))


def local(source: Path, files: Sequence[RemoteFile], work: Path, say: Say) -> Path:
    """A folder or an archive on this machine."""
    if source.is_dir():
        for remote in files:
            path = source / file_name(remote.url)
            if path.is_file():
                check(path, remote.checksum, say)
        return source
    if not source.is_file():
        raise CoterieError(f"{source}: no such file or folder")
    check(source, files[0].checksum if len(files) == 1 else "", say)
    return unpacked([source], work)


def check(path: Path, checksum: str, say: Say) -> None:
    found = digest(path, checksum.partition(":")[0] or "sha256")
    if checksum and found != checksum:
        raise CoterieError(f"{path}: wrong checksum {found}, expected {checksum}")
    verified(path.name, found, checksum, say)


def unpacked(paths: Sequence[Path], work: Path) -> Path:
    """A folder with these files, archives unpacked, and the archives that an archive contains, too."""
    made = work / "unpacked"
    for path in paths:
        if is_archive(path):
            unpack_archive(path, made / path.name)
        else:
            made.mkdir(exist_ok=True)
            check_space(made, path.stat().st_size, path.name)
            shutil.copyfile(path, made / path.name)
    contained = [path for folder in walk(made, 1) for path in folder.iterdir() if path.is_file()]
    for inner in (path for path in contained if path.name.lower().endswith(ENDINGS)):
        unpack_archive(inner, inner.with_name(f"{inner.name} unpacked"))
        inner.unlink()
    return made


def searched(name: str, folder: Path) -> Path:
    """The folder inside this one that has the dataset's files."""
    for place in walk(folder, DEPTH):
        if found_in(name, place):
            return place
    raise CoterieError(
        f"{name}: not in what was given; needed together in one folder: {', '.join(DATASETS[name].files)}"
    )


def copied(source: Path, work: Path, place: Path) -> None:
    """Copy a folder of the user's; it appears when it is complete."""
    try:
        shutil.copytree(source, work)
    except (OSError, shutil.Error) as error:
        raise CoterieError(f"{source}: cannot be copied ({error})") from None
    os.rename(work, place)
