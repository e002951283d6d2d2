"""The files of a run folder, verified whenever they are read.

`checksums.json` lists the length and SHA-256 of every file that results are read from. It is written with each
checkpoint and at the end, before result.json. Tables of an unfinished run grow: only the recorded part is verified.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from coterie.core.errors import CoterieError
from coterie.core.version import VERSION
from coterie.runs.disk import read_inside

FORMAT = 2  # of run folders; config.json records it, and version 1 wrote none
CHECKSUMS = "checksums.json"
ALWAYS = ("config.json", "metrics.csv", "clients.csv", "models/models.sha256", "result.json")
GROWING = ("metrics.csv", "clients.csv")  # until the run is finished
ADVICE = "Restore it from a copy; modified runs are not used"


class Changed(CoterieError):
    """A file of a run differs from what the run wrote."""


class OtherFormat(CoterieError):
    """A run folder was written by a version of Coterie with another folder format."""


class Checksum(NamedTuple):
    size: int  # bytes
    sha256: str

    @staticmethod
    def of(content: bytes) -> Checksum:
        return Checksum(len(content), hashlib.sha256(content).hexdigest())


class GrowingTable:
    """A CSV file that rows are appended to, and the checksum of all that was written."""

    def __init__(self) -> None:
        self.digest, self.length = hashlib.sha256(), 0
        self.file: Any = None  # set while the file is open

    def write(self, text: str) -> None:
        content = text.encode("utf-8", "backslashreplace")
        self.file.write(content)
        self.digest.update(content)
        self.length += len(content)

    @property
    def checksum(self) -> Checksum:
        return Checksum(self.length, self.digest.hexdigest())


def to_json(checksums: Mapping[str, Checksum]) -> str:
    return json.dumps({name: found._asdict() for name, found in sorted(checksums.items())}, indent=2) + "\n"


class RunFiles:
    """The files of one run folder. `OtherFormat` is raised for folders of other versions of Coterie."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def finished(self) -> bool:
        return os.path.lexists(self.folder / "result.json")

    @cached_property
    def checksums(self) -> dict[str, Checksum] | None:
        """None for an unfinished run that was killed before it wrote them."""
        self._check_format()
        try:
            listed = json.loads(read_inside(self.folder, CHECKSUMS))
            return {str(name): Checksum(int(found["size"]), str(found["sha256"])) for name, found in listed.items()}
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise Changed(f"{self.folder / CHECKSUMS} is damaged ({error})") from None

    def read(self, name: str) -> bytes:
        """The content of a file; `Changed` if the run wrote something else, FileNotFoundError if it is missing."""
        content = read_inside(self.folder, name)
        self._check(name, content)
        return content

    def verify(self) -> None:
        """Check all files of a finished run."""
        if not self.finished:
            return
        checksums = self.checksums
        if checksums is None:
            raise Changed(f"{self.folder} has no {CHECKSUMS}, so its results cannot be verified; restore that file")
        for name in {*checksums, *ALWAYS}:
            try:
                self.read(name)
            except (FileNotFoundError, ValueError):
                raise Changed(f"{self.folder / name} is missing; {CHECKSUMS} lists it. {ADVICE}") from None

    @contextmanager
    def parsing(self, name: str) -> Iterator[None]:
        """Turn errors in this block into one that names the file."""
        try:
            yield
        except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, RuntimeError) as error:
            raise self.damaged(name, error) from None

    def damaged(self, name: str, reason: object) -> CoterieError:
        text = f"{type(reason).__name__}: {reason}" if isinstance(reason, Exception) else str(reason)
        return CoterieError(f"{self.folder / name} is damaged, or was not written by a run ({text.splitlines()[0]})")

    def _check(self, name: str, content: bytes) -> None:
        path, known = self.folder / name, (self.checksums or {}).get(name)
        if known is None:
            if self.finished:
                raise Changed(f"{path} has no checksum in {CHECKSUMS}; without it the run's results cannot be verified")
            return
        grows = name in GROWING and not self.finished
        if len(content) < known.size or (len(content) > known.size and not grows):
            raise Changed(f"{path} has {len(content):,} bytes; the run wrote {known.size:,}. {ADVICE}")
        if Checksum.of(content[: known.size]) != known:
            raise Changed(f"{path} is not what the run wrote: its SHA-256 differs from {CHECKSUMS}. {ADVICE}")

    def _check_format(self) -> None:
        """Comes before verification, since other formats verify differently."""
        try:
            config = json.loads(read_inside(self.folder, "config.json"))
        except (OSError, ValueError, RecursionError):
            return  # reported by the code that needs config.json
        if not isinstance(config, dict) or (found := config.get("format", 1)) == FORMAT:
            return
        ran = config.get("ran")
        version = ran.get("coterie", "unknown") if isinstance(ran, dict) else "unknown"
        newer = isinstance(found, int) and found > FORMAT
        advice = "Upgrade Coterie to open it" if newer else f"Open it with Coterie {version}, or repeat the run"
        raise OtherFormat(
            f"{self.folder / 'config.json'}: a run of format {found}, written by Coterie {version}; "
            f"Coterie {VERSION} reads format {FORMAT}. {advice}"
        )
