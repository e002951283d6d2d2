"""All that a run needs to go on where it was stopped, bit for bit.

In the folder `checkpoint` of a run:

    history.jsonl               what happened, a line for each round
    clients-000012.safetensors  what those clients remember that trained since the checkpoint before
    server-000012.safetensors   the server's state; written last, and names everything that it needs

Randomness is a hash of the round, so there is no generator to save; what clients remember before they train comes from
the data, so it is made again. The last two checkpoints are kept. Every file and line has a SHA-256 of its content.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from coterie.clients import Clients, Scores
from coterie.core import tree
from coterie.core.errors import CoterieError
from coterie.federation.disk import whole
from coterie.federation.history import History, Round

log = logging.getLogger("coterie")
FORMAT = 1  # of these files
MOST = 256  # files of clients that a checkpoint needs; what is in older ones is written again


class Damaged(Exception):
    """A file is not as it was written."""


class Snapshot(NamedTuple):
    """A run between two rounds; nothing that goes on changes it."""

    round: int
    server: tree.Tree  # by dotted name
    clients: Tensor  # (C,) who changed since the last checkpoint, or whose file is too old
    rows: tree.Tree  # (C, ...) what they remember
    records: tuple[Round, ...]  # the last ones, those that may not be written yet among them


class Checkpoints:
    """Those of one run. Saving takes a copy and returns; one thread writes."""

    def __init__(self, folder: Path, clients: Clients, config: Mapping[str, Any], every: int = 1) -> None:
        self.folder, self.clients, self.every = folder, clients, every
        self.config = dict(decisive(config))
        self.trained = torch.zeros(clients.count, dtype=torch.int64)  # (m,) round of each client's last change
        self.held = self.trained.clone()  # (m,) which file has what a client remembers; 0: none, it never trained
        self.before = self.held  # the same one checkpoint earlier
        self.sums: dict[int, str] = {}  # round -> checksum of its file of clients
        self.old: list[int] = []  # rounds whose files are too many
        self.saved = 0  # round of the last checkpoint; 0: none yet
        self.previous = 0  # and of the one before
        self.lines = 0  # bytes of the history that are good
        self.failing = False
        self.writer = Writer(self._write)

    def restore(self, server: Any) -> tuple[Any, History]:
        """The last good server state and history, and the clients remember what they did; as given, if none is good.

        server: the state before the first round.
        """
        history, ends = self._history()
        for path in sorted(self.folder.glob("server-*.safetensors"), reverse=True):
            try:
                tensors, about = read(path)
                same(about["config"], self.config)
                found = self._usable(about, len(history))
            except Damaged as error:
                log.warning("a checkpoint is damaged, the one before it is used: %s", error)
                continue
            self._remember(found)
            self.saved = self.previous = int(about["round"])
            self.lines = ends[self.saved - 1]
            self._tidy()
            return filled(server, tensors), History(history[: self.saved])
        log.warning("there is no good checkpoint; the run begins again at round 1")
        self._tidy()
        return server, History()

    def after(self, server: Any, history: History, now: bool = False) -> None:
        """A round has ended. now: save, whatever its number."""
        number = len(history)
        self.trained[history[-1].participants] = number
        if not self.every or not (now or number % self.every == 0):
            return
        saved = self.saved  # the writer may be about to change it
        changed = ((self.trained > saved) | torch.isin(self.held, torch.tensor(self.old))).nonzero()[:, 0]
        rows = tree.flatten(self.clients.states.fetched(changed)) if len(changed) else {}
        state = {name: t.detach().to("cpu", copy=True) for name, t in tree.items(server)}
        self.writer.hand(Snapshot(number, state, changed, rows, tuple(history[saved:])))

    def settle(self) -> None:
        """Wait until what was handed in is written."""
        self.writer.settle()

    def close(self, wait: bool = True) -> None:
        """wait: until what was handed in is written. Otherwise for a moment only."""
        self.writer.close(wait)

    def remove(self) -> None:
        """The run has ended, nobody will go on with it."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _write(self, snapshot: Snapshot) -> None:
        try:
            self._save(snapshot)
        except Exception as error:  # whatever it is, training is worth more
            if not self.failing:
                last = f"round {self.saved}" if self.saved else "none"
                log.warning("round %d cannot be saved: %s; the run goes on, the last checkpoint is of %s",
                            snapshot.round, reason(error), last)  # fmt: skip
            self.failing = True
        else:
            if self.failing:
                log.warning("round %d is saved, checkpoints can be written again", snapshot.round)
            self.failing = False

    def _save(self, snapshot: Snapshot) -> None:
        self.folder.mkdir(exist_ok=True)
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

    def _append(self, records: tuple[Round, ...]) -> int:
        """Lines after the good ones of the history; where they end."""
        path = self.folder / "history.jsonl"
        with path.open("r+b" if path.exists() else "w+b") as file:
            file.truncate(self.lines)  # what came after was never part of a checkpoint
            file.seek(self.lines)
            file.writelines(to_line(record) for record in records)
            file.flush()
            os.fsync(file.fileno())
            return file.tell()

    def _history(self) -> tuple[list[Round], list[int]]:
        """The rounds up to the first line that is not whole, and where the line of each ends."""
        records, ends, end = list[Round](), list[int](), 0
        path = self.folder / "history.jsonl"
        if path.exists():
            with path.open("rb") as file:
                for line in file:
                    try:
                        records.append(from_line(line))
                    except Damaged:
                        break
                    end += len(line)
                    ends.append(end)
        return records, ends

    def _usable(self, about: dict[str, Any], lines: int) -> list[tuple[int, Path]]:
        """The files of clients that belong to a checkpoint, by round."""
        if lines < about["round"]:
            raise Damaged(f"{self.folder / 'history.jsonl'} has {lines} good lines of {about['round']}")
        found = [(int(n), self.folder / f"clients-{int(n):06}.safetensors") for n in about["clients"]]
        for number, path in found:
            if checksum(*read(path)) != about["clients"][str(number)]:
                raise Damaged(f"{path} is of another run")
            self.sums[number] = about["clients"][str(number)]
        return sorted(found)

    def _remember(self, files: list[tuple[int, Path]]) -> None:
        """Clients get their rows back, those of the first rounds first."""
        for number, path in files:
            tensors, _ = read(path)
            ids = tensors.pop("ids")
            rows = {name.removeprefix("rows."): t for name, t in tensors.items()}
            self.clients.states.restore(ids, rows)
            self.held[ids] = number
            self.trained[ids] = number
        self.before = self.held

    def _tidy(self) -> None:
        """Only what the last two checkpoints need stays."""
        kept = {f"server-{n:06}.safetensors" for n in (self.saved, self.previous)}
        kept |= {f"clients-{n:06}.safetensors" for n in (*rounds(self.held), *rounds(self.before))}
        for path in (*self.folder.glob("*.safetensors"), *self.folder.glob("*.part")):
            if path.name not in kept:
                path.unlink(missing_ok=True)


class Writer:
    """A thread that writes what it is handed. Of several that come while it is busy the last one only."""

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
    """Whose files are needed."""
    return sorted(set(held.tolist()) - {0})


def write(path: Path, tensors: tree.Tree, about: dict[str, Any]) -> str:
    """Its checksum."""
    about = json.loads(json.dumps({"format": FORMAT, **about}))  # as it will be read
    tensors = {name: t.contiguous() for name, t in tensors.items()}
    found = checksum(tensors, about)
    with whole(path) as part:
        save_file(tensors, part, {"about": json.dumps(about), "sha256": found})
    return found


def read(path: Path) -> tuple[tree.Tree, dict[str, Any]]:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            about = json.loads(metadata["about"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        good = metadata["sha256"] == checksum(tensors, about)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise Damaged(f"{path} cannot be read ({reason(error)})") from None
    if not good:
        raise Damaged(f"{path} has another checksum than it was written with")
    if about["format"] != FORMAT:
        raise CoterieError(f"{path} is a checkpoint of another version of Coterie")
    return tensors, about


def checksum(tensors: tree.Tree, about: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, t in sorted(tensors.items()):
        digest.update(f"\n{name} {t.dtype} {tuple(t.shape)}\n".encode())
        digest.update(raw(t))
    return digest.hexdigest()


def raw(t: Tensor) -> memoryview:
    t = t.detach().cpu().contiguous()
    return t.as_strided((t.numel(),), (1,)).view(torch.uint8).numpy().data


def filled(server: Any, tensors: tree.Tree) -> Any:
    """A server state of this form, with these tensors, on its device."""
    form = tree.flatten(server)
    if form.keys() != tensors.keys():
        raise CoterieError(
            f"the checkpoint has another server state: {', '.join(sorted(form.keys() ^ tensors.keys()))}"
        )
    return tree.fill(server, {name: tensors[name].to(t.device, copy=True) for name, t in form.items()})


def to_line(record: Round) -> bytes:
    content = json.dumps(
        {
            **vars(record),
            "participants": to_text(record.participants),
            "scores": [[*at, *map(to_text, scores)] for at, scores in record.scores.items()],
            "report": {name: to_text(t) for name, t in record.report.items()},
        }
    ).encode()
    return hashlib.sha256(content).hexdigest().encode() + b" " + content + b"\n"


def from_line(line: bytes) -> Round:
    found, _, content = line.partition(b" ")
    if not line.endswith(b"\n") or found != hashlib.sha256(content[:-1]).hexdigest().encode():
        raise Damaged("the line is not whole")
    told = json.loads(content)
    told["participants"] = from_text(told["participants"])
    told["left_out"] = tuple(told["left_out"])
    told["scores"] = {(point, split): Scores(*map(from_text, columns)) for point, split, *columns in told["scores"]}
    told["report"] = {name: from_text(t) for name, t in told["report"].items()}
    return Round(**told)


def to_text(t: Tensor) -> list[Any]:
    """Such as ["float64", [2, 3], "AAAA..."]."""
    return [str(t.dtype).removeprefix("torch."), list(t.shape), base64.b64encode(raw(t)).decode()]


def from_text(told: list[Any]) -> Tensor:
    dtype, shape, content = getattr(torch, told[0]), told[1], bytearray(base64.b64decode(told[2]))
    return torch.frombuffer(content, dtype=dtype).view(shape) if content else torch.zeros(shape, dtype=dtype)


# What must be as it was for a run to go on: these parts of its configuration, in dotted names.
ALIKE = ("method", "protection", "encryption", "model", "data", "federation", "execution.precision",
         "execution.cohort", "execution.deterministic", "ran.clients", "ran.device", "ran.coterie",
         "ran.torch")  # fmt: skip


def same(before: Mapping[str, str], now: Mapping[str, str], what: str = "run") -> None:
    """An error that names what is not as it was."""
    differ = [
        f"{name} was {before.get(name, 'not set')} and is {now.get(name, 'not set')}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]
    if differ:
        more = f", and {len(differ) - 5} more" if len(differ) > 5 else ""
        raise CoterieError(f"this is not the {what} that was begun: {'; '.join(differ[:5])}{more}")


def decisive(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What must be alike, in words; what is long in the form of its checksum."""
    for name, value in dotted(config):
        if any(name == part or name.startswith(f"{part}.") for part in ALIKE):
            text = json.dumps(value)
            yield name, text if len(text) <= 80 else f"content {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def dotted(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(config, Mapping):
        yield prefix, config
        return
    for name, value in config.items():
        yield from dotted(value, f"{prefix}.{name}" if prefix else str(name))


def reason(error: Exception) -> str:
    """In words. What safetensors says ends in what the system says."""
    told = str(getattr(error, "strerror", None) or error)
    return told.rpartition("I/O error: ")[2].partition(" (os error")[0]
