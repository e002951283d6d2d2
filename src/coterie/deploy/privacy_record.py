"""The record of all answers of a device under differential privacy, written to disk before an answer is sent.

    privacy/client-3.json                          all answers of client 3, in all federations, with their cost
    FEDERATION/client-3/answer-train-4-0f3a....bin the last answers, to be sent again if a message was lost

Every answer draws fresh noise. Two answers about the same samples in one round would reveal more than one, so a client
answers one request per round: a repeated request gets the same bytes, a different one is refused, also after a restart.
Answers count against the budget whether or not the server received them.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from coterie.deploy.store import federation_folder
from coterie.deploy.wire import Header
from coterie.privacy import Protection, merged
from coterie.privacy.accountant import Spent, best_accountant, epsilon
from coterie.privacy.private_sgd import CUT
from coterie.runs.disk import whole, writing
from coterie.runs.model_files import sha256

log = logging.getLogger("coterie")
DELTA = 1e-5
KEPT = 3  # number of stored answers per client
COUNTED = ("train", "finish")  # kinds of requests whose answers draw noise


class RequestFailed(Exception):
    """A client cannot process a request; the text is sent to the server."""


class RecordedAnswer(NamedTuple):
    """An answer in the record."""

    federation: str
    kind: str
    round: int
    request: str  # its checksum, which covers the shared part and the version of the client's state
    answer: str  # checksum
    spent: tuple[Spent, ...]


@dataclass(frozen=True)
class PrivacyBudget:
    """How much privacy a device may spend."""

    protection: Protection
    rounds: int  # of the federation; all clients may train once more after the last one
    max_epsilon: float | None = None  # None: the cost of the agreed rounds
    delta: float = DELTA

    def check(self, header: Header, entries: Sequence[RecordedAnswer], cost: Sequence[Spent]) -> None:
        """Raise `RequestFailed` if one more answer would exceed the budget."""
        if not 0 <= header.round <= self.rounds:
            raise RequestFailed(f"round {header.round + 1} is beyond the agreed {self.rounds} rounds")
        after = self.epsilon([spent for entry in entries for spent in entry.spent] + list(cost))
        if self.max_epsilon is not None and after > self.max_epsilon:
            raise RequestFailed(
                f"privacy budget exhausted: one more answer would raise ε to {after:.4g} at δ = {self.delta:g}; "
                f"--max-epsilon is {self.max_epsilon:g}"
            )

    def epsilon(self, spent: Sequence[Spent]) -> float:
        delta = self.delta - CUT * sum(part.times for part in spent)
        return epsilon(merged(spent), delta) if delta > 0 else math.inf


class PrivacyRecord:
    def __init__(self, folder: Path, federation: str, budget: PrivacyBudget) -> None:
        """folder: of the device. A client has a single budget for all federations in this folder."""
        self.folder, self.federation, self.budget = folder, federation, budget

    def once(self, header: Header, cost: Sequence[Spent], make: Callable[[], bytes]) -> bytes:
        """The answer to this request: the stored one, or a new one, which is on disk when this returns."""
        client = header.client
        with self._locked():
            entries = self.entries(client)
            where = (self.federation, header.kind, header.round)
            for entry in entries:
                if entry[:3] == where:
                    return self._stored_answer(client, entry, header)
            self.budget.check(header, entries, cost)
            answer = make()
            entry = RecordedAnswer(*where, header.made, sha256(answer), tuple(cost))
            self._store(client, entry, answer)
            self._write(client, [*entries, entry])
            return answer

    def spent(self, client: int) -> tuple[int, float]:
        """The number of recorded answers of a client, and their ε."""
        entries = self.entries(client)
        return len(entries), self.budget.epsilon([spent for entry in entries for spent in entry.spent])

    def summary(self, clients: Sequence[int]) -> str:
        """The privacy that these clients have spent, in one line."""
        found = [f"client {i}: ε = {self.spent(i)[1]:.4g} ({self.spent(i)[0]} answers)" for i in clients]
        how = f"δ = {self.budget.delta:g}, accountant: {best_accountant()}"
        return f"privacy spent ({how}), in all federations of this folder: {'; '.join(found)}"

    def entries(self, client: int) -> list[RecordedAnswer]:
        path = self._path(client)
        if not path.exists():
            return []
        try:
            content = json.loads(path.read_bytes())
            if content["sha256"] != sha256(encoded(content["answers"])):
                raise ValueError("checksum mismatch")
            return [
                RecordedAnswer._make([*row[:5], tuple(Spent(*part) for part in row[5])]) for row in content["answers"]
            ]
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.error("cannot read %s (%s); client %d does not answer until it is restored", path, error, client)
            raise RequestFailed("its record of earlier answers is damaged") from None

    def _stored_answer(self, client: int, entry: RecordedAnswer, header: Header) -> bytes:
        if entry.request != header.made:
            raise RequestFailed(
                f"it already answered another request in round {header.round + 1}; a second answer would reveal more "
                "than was agreed"
            )
        path = self._answer_path(client, entry)
        answer = path.read_bytes() if path.exists() else b""
        if sha256(answer) != entry.answer:
            raise RequestFailed("it already answered this request, and the stored answer is gone")
        return answer

    def _store(self, client: int, entry: RecordedAnswer, answer: bytes) -> None:
        path = self._answer_path(client, entry)
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole(path) as part:
            part.write_bytes(answer)
        known = {self._answer_path(client, old).name for old in [*self.entries(client)[-(KEPT - 1) :], entry]}
        for old in path.parent.glob("answer-*.bin"):
            if old.name not in known:
                old.unlink(missing_ok=True)

    def _write(self, client: int, entries: Sequence[RecordedAnswer]) -> None:
        rows = [[*entry[:5], [list(part) for part in entry.spent]] for entry in entries]
        path = self._path(client)
        with whole(path) as part:
            part.write_text(json.dumps({"answers": rows, "sha256": sha256(encoded(rows))}))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Serialize the processes of this device: Flower may start several at once."""
        folder = self.folder / "privacy"
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            file = (folder / "lock").open("ab")
        with file:
            if sys.platform != "win32":
                import fcntl

                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _path(self, client: int) -> Path:
        return self.folder / "privacy" / f"client-{client}.json"

    def _answer_path(self, client: int, entry: RecordedAnswer) -> Path:
        name = f"answer-{entry.kind}-{entry.round}-{entry.request[:16]}.bin"
        return federation_folder(self.folder, entry.federation) / f"client-{client}" / name


def encoded(rows: Any) -> bytes:
    return json.dumps(rows).encode()
