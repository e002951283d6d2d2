"""Follow a run in progress, in any process, by reading what is appended to the files of its folder."""

from __future__ import annotations

import csv
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from coterie.core.errors import CoterieError
from coterie.data.partition import DAMAGED
from coterie.runs.checksums import RunFiles
from coterie.runs.disk import open_inside
from coterie.runs.stored_run import StoredRun
from coterie.runs.tables import ClientTable, Measures, add_clients, add_row, lines

QUIET = 60.0  # seconds without a new round after which a run is stale, at least
ROUNDS = 5  # or this many times its slowest recent round
RECENT = 10  # rounds that the remaining time is estimated from
FIRST = 600.0  # seconds that a run has for its first round


class Growth(NamedTuple):
    """How far a table has been read."""

    file: int = 0  # inode
    read: int = 0  # bytes
    header: tuple[str, ...] = ()


class FollowedRun(StoredRun):
    """A run whose tables are read as they grow: every call of `refresh` reads only what was added."""

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        self.changed = 0.0  # when a file changed last
        self.problem = ""  # why it cannot be read
        self._signature: tuple[object, ...] = ()
        self._restart()

    def _restart(self) -> None:
        self._growth = {"metrics.csv": Growth(), "clients.csv": Growth()}
        self.rounds: dict[int, Measures] = {}
        self.client_table = ClientTable({}, {}, {})
        self.left_out: Counter[str] = Counter()  # client -> rounds in which it gave no usable answer
        self.left_out_now: list[str] = []  # in the last round

    def refresh(self) -> bool:
        """Read what is new. Returns whether anything is."""
        signature = tuple(self._stat(name) for name in ("config.json", "metrics.csv", "clients.csv", "result.json"))
        if signature == self._signature:
            return False
        self._signature = signature
        for name in ("config", "metric", "result"):
            self.__dict__.pop(name, None)
        self.files, self._missing = RunFiles(self.folder), {}
        try:
            tables = [(self._stat(name), growth) for name, growth in self._growth.items()]
            if any(now[0] != before.file or now[1] < before.read for now, before in tables):
                self._restart()  # a table was written again, as when a run is resumed
            for row in self._added("metrics.csv"):
                add_row(self.rounds, row)
                self.left_out_now = row["left_out"].split()
                self.left_out.update(self.left_out_now)
            add_clients(self.client_table, self._added("clients.csv"), self.metric)
            self.problem = ""
        except (*DAMAGED, CoterieError, csv.Error) as error:
            self.problem = str(error)
        return True

    def _stat(self, name: str) -> tuple[int, int, int]:
        """Inode, size and time of a file; zeros if it is missing."""
        try:
            found = os.lstat(self.folder / name)
        except OSError:
            return 0, 0, 0
        self.changed = max(self.changed, found.st_mtime)
        return found.st_ino, found.st_size, found.st_mtime_ns

    def _added(self, name: str) -> list[dict[str, str]]:
        """The complete lines that were added to a table."""
        try:
            with open_inside(self.folder, name) as file:
                before = self._growth[name]
                file.seek(before.read)
                content = file.read()
                inode = os.fstat(file.fileno()).st_ino
        except FileNotFoundError:
            return []
        content = content[: content.rfind(b"\n") + 1]
        rows = list(csv.reader(lines(content)))
        header = before.header or tuple(rows.pop(0) if rows else ())
        self._growth[name] = Growth(inode, before.read + len(content), header)
        return [dict(zip(header, row, strict=True)) for row in rows if len(row) == len(header)]

    @property
    def done(self) -> int:
        """Completed rounds."""
        return min(max(self.rounds, default=0), self.planned)

    @property
    def seconds(self) -> Sequence[float]:
        """Of the last rounds."""
        recent = [self.rounds[number] for number in sorted(self.rounds)[-RECENT:]]
        return [sum(v for name, v in row.items() if name.startswith("seconds_")) for row in recent]

    @property
    def seconds_left(self) -> float | None:
        """Estimated from the last rounds; None if nothing is known."""
        seconds = self.seconds
        return None if not seconds else (self.planned - self.done) * sum(seconds) / len(seconds)

    def state(self, now: float | None = None) -> str:
        """finished, running or stale. now: seconds since the epoch; default: the current time."""
        if self.result is not None:
            return "finished"
        patience = max([QUIET, *(ROUNDS * spent for spent in self.seconds)]) if self.rounds else FIRST
        return "stale" if (time.time() if now is None else now) - self.changed > patience else "running"
