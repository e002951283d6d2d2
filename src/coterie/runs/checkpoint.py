"""Checkpoints: the state from which a run resumes, bit for bit.

In the folder `checkpoint` of a run:

    history.jsonl               one line per round
    clients-000012.safetensors  states of the clients that trained since the previous checkpoint
    server-000012.safetensors   the server's state; written last, and lists all files that it needs

Randomness is a hash of the round, so there is no generator to save. Initial client states come from the data and are
made again. The last two checkpoints are kept; a finished run keeps the last one, from which it can be extended. A
server state that is not finite is never written.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.core import tree
from coterie.core.errors import Diverged, some_of
from coterie.execution import Backend
from coterie.federation.history import History, Round
from coterie.runs.checkpoint_files import Damaged, checksum, filled, from_line, read, reason, to_line, write
from coterie.runs.disk import open_inside, subfolder
from coterie.runs.matching import decisive, same

log = logging.getLogger("coterie")
MOST = 256  # client files per checkpoint; rows in older files are written again
LARGE = 1 << 30  # bytes; larger client states are not gathered into one file at the end


class Snapshot(NamedTuple):
    """A copy of the state between two rounds."""

    round: int
    server: tree.Tree  # by dotted name
    clients: Tensor  # (C,) that changed since the last checkpoint, or whose file is too old
    rows: tree.Tree  # (C, ...) their states
    records: tuple[Round, ...]  # the latest rounds, including all that are not written yet
    after: Callable[[], None] = lambda: None  # called once it is on the disk


class Checkpoints:
    """The checkpoints of one run. Saving copies the state and returns; a thread writes it."""

    def __init__(
        self,
        folder: Path,
        backend: Backend,
        config: Mapping[str, Any],
        every: int = 1,
        also: Callable[[], Callable[[], None]] = lambda: lambda: None,  # what else to write with each checkpoint
    ) -> None:
        self.folder, self.backend, self.every, self.also = folder, backend, every, also
        self.config = dict(decisive(config))
        self.trained = torch.zeros(backend.num_clients, dtype=torch.int64)  # (m,) round of each client's last change
        self.held = self.trained.clone()  # (m,) round of the file with each client's state; 0: never trained
        self.before = self.held  # the same for the previous checkpoint
        self.sums: dict[int, str] = {}  # round -> checksum of its file of clients
        self.old: list[int] = []  # rounds whose files exceed MOST
        self.saved = 0  # round of the last checkpoint; 0: none yet
        self.previous = 0  # round of the one before
        self.lines = 0  # valid bytes of the history
        self.failing = False
        self.writer = Writer(self._write)

    def restore(self, server: Any) -> tuple[Any, History]:
        """Restore the clients, and return server state and history of the last valid checkpoint.

        server: the state before the first round, returned if there is no valid checkpoint.
        """
        subfolder(self.folder.parent, self.folder.name)
        history, ends = self._history()
        for path in sorted(self.folder.glob("server-*.safetensors"), reverse=True):
            try:
                tensors, about = read(path)
                same(about["config"], self.config)
                found = self._usable(about, len(history))
                if bad := tree.not_finite(tensors):
                    raise Damaged(f"the server's state of round {about['round']} is not finite ({some_of(bad)})")
            except Damaged as error:
                log.warning("a checkpoint is damaged or not finite, trying the previous one: %s", error)
                continue
            self._remember(found)
            self.saved = self.previous = int(about["round"])
            self.lines = ends[self.saved - 1]
            self._tidy()
            return filled(server, tensors), History(history[: self.saved])
        log.warning("no valid checkpoint; the run starts again at round 1")
        self._tidy()
        return server, History()

    def after(self, server: Any, history: History, now: bool = False) -> None:
        """Save after a round, if it is due. now: always save. Raise Diverged for a state that is not finite."""
        number = len(history)
        self.trained[history[-1].participants] = number
        if not self.every or not (now or number % self.every == 0):
            return
        state = {name: t.detach().to("cpu", copy=True) for name, t in tree.items(server)}
        if bad := tree.not_finite(state):
            raise Diverged(f"round {number}: the server's state is not finite ({some_of(bad)}); it is not saved")
        saved = self.saved  # the writer thread may change it
        wanted = (self.trained > saved) | torch.isin(self.held, torch.tensor(self.old))
        if history.ended and self.backend.states.row_bytes * self.backend.num_clients <= LARGE:
            wanted = self.trained > 0  # in one file, without rows that newer files replace
        changed = wanted.nonzero()[:, 0]
        rows = tree.flatten(self.backend.states.fetched(changed)) if len(changed) else {}
        self.writer.hand(Snapshot(number, state, changed, rows, tuple(history[saved:]), self.also()))

    def settle(self) -> None:
        """Wait until the last snapshot is written."""
        self.writer.settle()

    def close(self, wait: bool = True) -> None:
        """Stop the writer. wait: until the last snapshot is written; otherwise for a second at most."""
        self.writer.close(wait)

    def remove(self) -> None:
        """Delete all checkpoints."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def seal(self, history: History, keep_state: bool = True) -> None:
        """Keep the whole history of a finished run and, if it is to be extendable, its last checkpoint."""
        self.close()
        last = history.ended.round if history.ended else 0
        if not keep_state or self.saved != last:
            self.remove()
            self.saved, self.lines = 0, 0
            self.held = torch.zeros_like(self.held)
        self.previous, self.before = self.saved, self.held
        try:
            self.folder.mkdir(exist_ok=True)
            self._append(tuple(history[self.saved :]))
            self._tidy()
        except OSError as error:
            log.warning("the state needed to extend the run cannot be kept: %s", reason(error))

    def _write(self, snapshot: Snapshot) -> None:
        try:
            self._save(snapshot)
        except Exception as error:  # training continues, whatever it is
            if not self.failing:
                last = f"round {self.saved}" if self.saved else "none"
                log.warning("round %d cannot be saved: %s; the run continues, the last checkpoint is of %s",
                            snapshot.round, reason(error), last)  # fmt: skip
            self.failing = True
        else:
            if self.failing:
                log.warning("round %d is saved, checkpoints can be written again", snapshot.round)
            self.failing = False

    def _save(self, snapshot: Snapshot) -> None:
        subfolder(self.folder.parent, self.folder.name, make=True)
        number, held, sums = snapshot.round, self.held.clone(), dict(self.sums)
        lines = self._append(snapshot.records[-(number - self.saved) :])
        if len(snapshot.clients):
            rows = {"ids": snapshot.clients, **{f"rows.{name}": t for name, t in snapshot.rows.items()}}
            sums[number] = write(self.folder / f"clients-{number:06}.safetensors", rows, {"round": number})
            held[snapshot.clients] = number
        needed = {str(r): sums[r] for r in rounds(held)}
        about = {"round": number, "clients": needed, "config": self.config}
        write(self.folder / f"server-{number:06}.safetensors", snapshot.server, about)
        self.before, self.held, self.sums = self.held, held, {r: sums[r] for r in rounds(held)}
        self.previous, self.saved, self.lines = self.saved, number, lines
        self.old = rounds(held)[:-MOST]
        self._tidy()
        snapshot.after()

    def _append(self, records: tuple[Round, ...]) -> int:
        """Append rounds after the valid lines of the history; returns the new length in bytes."""
        with open_inside(self.folder, "history.jsonl", "w+b") as file:
            file.truncate(self.lines)  # the rest was never part of a checkpoint
            file.seek(self.lines)
            file.writelines(to_line(record) for record in records)
            file.flush()
            os.fsync(file.fileno())
            return file.tell()

    def _history(self) -> tuple[list[Round], list[int]]:
        """The rounds up to the first damaged line, and the byte at which the line of each ends."""
        records, ends, end = list[Round](), list[int](), 0
        if os.path.lexists(self.folder / "history.jsonl"):
            with open_inside(self.folder, "history.jsonl") as file:
                for line in file:
                    try:
                        records.append(from_line(line))
                    except Damaged:
                        break
                    end += len(line)
                    ends.append(end)
        return records, ends

    def _usable(self, about: dict[str, Any], lines: int) -> list[tuple[int, Path]]:
        """The client files that a checkpoint needs, by round."""
        if lines < about["round"]:
            raise Damaged(f"{self.folder / 'history.jsonl'} has {lines} valid lines of {about['round']}")
        found = [(int(n), self.folder / f"clients-{int(n):06}.safetensors") for n in about["clients"]]
        for number, path in found:
            if checksum(*read(path)) != about["clients"][str(number)]:
                raise Damaged(f"{path} belongs to another run")
            self.sums[number] = about["clients"][str(number)]
        return sorted(found)

    def _remember(self, files: list[tuple[int, Path]]) -> None:
        """Restore client states, from the oldest file to the newest."""
        for number, path in files:
            tensors, _ = read(path)
            ids = tensors.pop("ids")
            rows = {name.removeprefix("rows."): t for name, t in tensors.items()}
            self.backend.states.restore(ids, rows)
            self.held[ids] = number
            self.trained[ids] = number
        self.before = self.held

    def _tidy(self) -> None:
        """Delete files that the last two checkpoints do not need."""
        kept = {f"server-{n:06}.safetensors" for n in (self.saved, self.previous)}
        kept |= {f"clients-{n:06}.safetensors" for n in (*rounds(self.held), *rounds(self.before))}
        for path in (*self.folder.glob("*.safetensors"), *self.folder.glob("*.part")):
            if path.name not in kept:
                path.unlink(missing_ok=True)


class Writer:
    """A thread that writes snapshots. Of several that arrive while it is busy, it writes only the last."""

    def __init__(self, write: Callable[[Snapshot], None]) -> None:
        self.write, self.closing, self.busy = write, False, False
        self.waiting: Snapshot | None = None
        self.changed = threading.Condition()
        self.thread: threading.Thread | None = None

    def hand(self, snapshot: Snapshot) -> None:
        if self.thread is None:
            self.thread = threading.Thread(target=self._work, name="checkpoints", daemon=True)
            self.thread.start()
        with self.changed:
            self.waiting = snapshot
            self.changed.notify_all()

    def settle(self) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.waiting is None and not self.busy)

    def close(self, wait: bool) -> None:
        with self.changed:
            self.closing = True
            if not wait:
                self.waiting = None
            self.changed.notify_all()
        if self.thread:
            self.thread.join(None if wait else 1.0)

    def _work(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.waiting is not None or self.closing)
                snapshot, self.waiting = self.waiting, None
                self.busy = snapshot is not None
            if snapshot is None:
                return
            self.write(snapshot)
            with self.changed:
                self.busy = False
                self.changed.notify_all()


def rounds(held: Tensor) -> list[int]:
    """The rounds whose client files are needed."""
    return sorted(set(held.tolist()) - {0})
