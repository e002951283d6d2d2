"""Clients on machines of their own: their data and what they remember stay there, letters and answers travel.

What is known here of what a client remembers is its version. It goes on to the next one when a good answer to a letter
has come, so whoever did not answer in time has not trained, whatever its device thinks.
"""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from coterie.clients.base import Clients, Returned, Scores, Turn, commonest
from coterie.clients.states import States
from coterie.core import tree
from coterie.core.errors import CoterieError
from coterie.core.method import Census
from coterie.network.letters import LOST, Agreement, Letter, Said
from coterie.network.wire import Header, Refused

log = logging.getLogger("coterie")
WORDS = {"join": "join", "train": "train", "score": "be measured", "finish": "finish"}


@dataclass(frozen=True)
class Patience:
    """How long the server waits."""

    deadline: float = field(default=600.0, metadata={"help": "seconds that clients have for an answer"})
    grace: float = field(default=30.0, metadata={"help": "seconds that a device which vanished has to come back"})
    wait: float = field(default=3600.0, metadata={"help": "seconds to wait until enough devices are there"})

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise CoterieError(f"{name} must be more than 0 seconds, not {value:g}")


class Answer(NamedTuple):
    """A message came, from whoever speaks for this client."""

    client: int
    message: bytes


class Here(NamedTuple):
    """The device of these clients came, or came back: it may not have what it was sent."""

    clients: tuple[int, ...]


class Gone(NamedTuple):
    clients: tuple[int, ...]


Event = Answer | Here | Gone


class Post(ABC):
    """How letters travel to clients, and answers back."""

    @abstractmethod
    def send(self, client: int, letter: Letter) -> None: ...

    @abstractmethod
    def receive(self, seconds: float) -> Event | None:
        """The next thing that happens; None if nothing does in so many seconds."""

    @abstractmethod
    def present(self, client: int) -> bool:
        """Whether the device of this client is there, as far as one knows."""

    def left(self, client: int) -> float:
        """When the device of this client, which is not there, was last; on the clock of time.monotonic."""
        return -math.inf

    @abstractmethod
    def plan(self, kind: str, round: int, clients: list[int], seconds: float) -> None:
        """Tell whoever wants to know what is asked of whom."""

    @abstractmethod
    def refuse(self, client: int, reason: str) -> None:
        """Tell whoever speaks for this client why its message was not taken."""

    @abstractmethod
    def over(self) -> None:
        """The federation has ended."""

    @abstractmethod
    def close(self) -> None: ...


class Remote(Clients):
    elsewhere: ClassVar[bool] = True

    def __init__(
        self, agreement: Agreement, census: Census, post: Post, patience: Patience, may_miss: float = 0.5
    ) -> None:
        """may_miss: share of the clients asked that need not be there for a round to begin."""
        self.agreement, self.post, self.patience, self.may_miss = agreement, post, patience, may_miss
        self.method, self.model, self.device = agreement.method, agreement.model, torch.device("cpu")
        self.count, self.splits, self.census = agreement.clients, list(agreement.splits), census
        self.chance = commonest(census.class_counts)
        self.states = States(self.count, self.device)
        self.first: dict[int, Letter] = {}  # what clients were told when they joined
        self.measured: dict[str, Scores] = {}  # of the clients that trained last
        self.scored: tuple[Any, dict[str, Scores]] = ((), {})  # what was asked last, and what came of it

    def join(self, welcome: tree.Tree) -> None:
        self._gather(self.everyone.tolist())
        tensors = tree.flatten(welcome)
        for client in range(self.count):
            self.first[client] = self.agreement.letter(Header("join", client=client, base=""), tensors)
        self._remember(self.first.values())
        self._ask(self.first)

    def begin(self, clients: Tensor, downs: Any, turn: Turn) -> Returned:
        self._gather(clients.tolist())
        letters = self._letters("train", clients, downs, turn)
        answers = self._ask(letters)
        ids = sorted(answers)
        silent = tuple(i for i in clients.tolist() if i not in answers)
        self._remember(answers[i][0] for i in ids)
        if turn.measured:
            self.measured = self._scores({i: said.tensors for i, (_, said) in answers.items()})
        ups = tree.stack([self.agreement.up_of(answers[i][1].tensors) for i in ids]) if ids else ()
        return Returned(torch.tensor(ids, dtype=torch.int64), ups, torch.ones(len(ids), dtype=torch.bool), silent)

    def finish(self, clients: Tensor, downs: Any, turn: Turn) -> None:
        answers = self._ask(self._letters("finish", clients, downs, turn))
        self._remember(letter for letter, _ in answers.values())

    def score(self, clients: Tensor, downs: Any, split: str) -> Scores:
        """All splits are measured at once, when the first is asked for."""
        if self.scored[0] is not downs:
            answers = self._ask(self._letters("score", clients, downs, Turn(-1)))
            self.scored = downs, self._scores({i: said.tensors for i, (_, said) in answers.items()})
        return self.scored[1][split]

    def score_trained(self, downs: Any, returned: Returned, split: str) -> Scores:
        return self.measured[split]

    def score_global(self, server: Any, split: str) -> Scores | None:
        return None  # nobody's samples are here

    def close(self) -> None:
        self.post.close()

    def version(self, client: int) -> str:
        """Of what this client remembers."""
        return bytes(self.states[client]["version"].tolist()).hex()

    def _remember(self, letters: Iterable[Letter]) -> None:
        for letter in letters:
            made = torch.tensor(list(bytes.fromhex(letter.header.made)), dtype=torch.uint8)
            self.states[letter.header.client] = {"version": made}

    def _letters(self, kind: str, clients: Tensor, downs: Any, turn: Turn) -> dict[int, Letter]:
        shared = self.agreement.shared_message(tree.pick(downs, 0)) if self.agreement.shared.entries else b""
        letters = {}
        for row, client in enumerate(clients.tolist()):
            header = Header(kind, client=client, round=turn.round, rate=turn.rate, base=self.version(client))
            header = header._replace(measure=int(kind == "train" and turn.measured))
            letters[client] = self.agreement.letter(header, tree.flatten(tree.pick(downs, row)), shared)
        return letters

    def _gather(self, clients: list[int]) -> None:
        """Wait until enough of these clients are there; all of them, if they join."""
        needed = len(clients) - (int(self.may_miss * len(clients)) if self.first else 0)
        end, told = time.monotonic() + self.patience.wait, False
        while (here := sum(map(self.post.present, clients))) < max(needed, 1):
            if not told:
                log.warning(
                    "waiting for devices: %d of %d clients are there, %d are needed", here, len(clients), needed
                )
            told = True
            if time.monotonic() > end:
                raise CoterieError(
                    f"only {here} of {len(clients)} clients are there, and {needed} are needed; nobody else came in "
                    f"{self.patience.wait:g} s (--wait)"
                )
            self.post.receive(1.0)

    def _ask(self, letters: dict[int, Letter]) -> dict[int, tuple[Letter, Said]]:
        """What came of these letters in time: each with the letter that it answers."""
        asked = Asked(self, letters)
        try:
            asked.wait()
        finally:
            asked.tell()
        return asked.answers

    def _scores(self, told: dict[int, tree.Tree]) -> dict[str, Scores]:
        ids = sorted(told)
        found = {}
        for split in self.splits:
            rows = [told[i][split] for i in ids]
            table = torch.stack(rows) if rows else torch.zeros(0, 3, dtype=torch.float64)
            correct, total, loss = table.unbind(1)
            found[split] = Scores(torch.tensor(ids, dtype=torch.int64), correct, total.long(), loss)
        return found


class Asked:
    """Letters on their way, until all are answered or nobody waits any longer."""

    def __init__(self, remote: Remote, letters: dict[int, Letter]) -> None:
        self.remote, self.agreement, self.post = remote, remote.agreement, remote.post
        self.waiting = dict(letters)
        self.answers: dict[int, tuple[Letter, Said]] = {}
        self.reasons: dict[int, str] = {}  # why somebody is not waited for
        self.gone: dict[int, float] = {}  # until when those who vanished are waited for
        self.after: dict[int, Letter] = {}  # what clients that begin anew get when they have joined
        self.again: set[int] = set()  # who had to begin anew
        self.header = next(iter(letters.values())).header
        self.end = time.monotonic() + remote.patience.deadline
        self.post.plan(self.header.kind, self.header.round, list(letters), remote.patience.deadline)

    def wait(self) -> None:
        for client, letter in list(self.waiting.items()):
            if self.post.present(client):
                self.post.send(client, letter)
            elif (until := self.post.left(client) + self.remote.patience.grace) > time.monotonic():
                self.gone[client] = until
            else:
                self._drop(client, "its device is not there")
        while self.waiting:
            left = min([self.end, *self.gone.values()]) - time.monotonic()
            match self.post.receive(max(left, 0.0)):
                case Answer(client, message):
                    self._take(client, message)
                case Here(clients):
                    for client in self.waiting.keys() & set(clients):
                        self.gone.pop(client, None)
                        self.post.send(client, self.waiting[client])
                case Gone(clients):
                    until = time.monotonic() + self.remote.patience.grace
                    self.gone |= dict.fromkeys(self.waiting.keys() & set(clients), until)
            self._give_up()

    def tell(self) -> None:
        """In the log, who is left out and why."""
        where = f"round {self.header.round + 1}: " if self.header.round >= 0 else ""
        for client, reason in sorted(self.reasons.items()):
            log.warning("%sclient %d did not %s: %s", where, client, WORDS[self.header.kind], reason)

    def _give_up(self) -> None:
        now = time.monotonic()
        if now >= self.end:
            for client in list(self.waiting):
                self._drop(client, f"no answer in {self.remote.patience.deadline:g} s")
        for client in [client for client, until in self.gone.items() if now >= until]:
            self._drop(client, "its device vanished")

    def _drop(self, client: int, reason: str) -> None:
        self.reasons[client] = reason
        self.waiting.pop(client, None)
        self.gone.pop(client, None)

    def _take(self, client: int, message: bytes) -> None:
        letter = self.waiting.get(client)
        if letter is None:
            log.debug("an answer of client %d that nobody waits for", client)
            return
        try:
            said = self.agreement.open_answer(message, letter.header)
        except Refused as reason:
            log.warning("a message of client %d is refused: %s", client, reason)
            self.post.refuse(client, str(reason))
            return
        if said.header.kind == "trouble":
            if said.header.note == LOST and client not in self.again:
                self._anew(client, letter)
            else:
                self._drop(client, said.header.note or "it could not")
        elif client in self.after:
            self.remote._remember([letter])
            self._send(client, self.after.pop(client))
        else:
            self.answers[client] = letter, said
            self.waiting.pop(client)
            self.gone.pop(client, None)

    def _anew(self, client: int, letter: Letter) -> None:
        """Its device does not have what the client remembered: it joins again, then gets the same letter from there."""
        log.warning("client %d begins anew: %s", client, LOST)
        first = self.remote.first[client]
        tensors = self.agreement.open_letter(letter.own, letter.shared).tensors
        header = letter.header._replace(base=first.header.made, made="")
        self.again.add(client)
        self.after[client] = self.agreement.letter(header, tensors, letter.shared)
        self._send(client, first)

    def _send(self, client: int, letter: Letter) -> None:
        self.waiting[client] = letter
        self.post.send(client, letter)
