"""A backend whose clients run on devices: data and client states stay there; requests and answers travel.

The server knows only the version of each client's state. The version advances when a valid answer has arrived, so a
client that did not answer in time has not trained, whatever happened on its device.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from coterie.core import ranges, tree
from coterie.core.errors import CoterieError
from coterie.core.method import Census
from coterie.core.metrics import ACCURACY
from coterie.deploy.agreement import Agreement
from coterie.deploy.messages import Message, Received
from coterie.deploy.pending import PendingRequests, Timeouts
from coterie.deploy.server_samples import ServerTest
from coterie.deploy.transports.interface import Transport
from coterie.deploy.wire import Header, InvalidAnswer
from coterie.execution.answers import Returned
from coterie.execution.backend import Backend
from coterie.execution.memory import ClientMemory
from coterie.execution.requests import Turn
from coterie.execution.scoring import Scores, majority_share

log = logging.getLogger("coterie")
QUIET = 5.0  # seconds to wait for devices before a warning


class Remote(Backend):
    elsewhere: ClassVar[bool] = True

    def __init__(
        self,
        agreement: Agreement,
        census: Census,
        transport: Transport,
        timeouts: Timeouts,
        max_missing: float = 0.5,
        held: Mapping[str, Sequence[int]] | None = None,
        names: Sequence[str] = (),
        resumed: bool = False,
        test: ServerTest | None = None,
    ) -> None:
        """max_missing: fraction of the selected clients that may be missing when a round begins.

        held: split -> number of samples that each client announced. names: of the clients. resumed: all clients joined
        before, so the run continues without waiting for all of them. test: samples of the server for the global model.
        """
        self.test, self.server_tests = test, test is not None
        self.names, self.resumed = names, resumed
        self.agreement, self.transport, self.timeouts = agreement, transport, timeouts
        self.max_missing, self.held = max_missing, held or {}
        self.method, self.model, self.device = agreement.method, agreement.model, torch.device("cpu")
        self.num_clients, self.splits, self.census = agreement.num_clients, list(agreement.splits), census
        counted = agreement.model.task.one_class and agreement.model.task.metric == ACCURACY
        self.chance = majority_share(census.class_counts) if counted else None
        self.states = ClientMemory(self.num_clients, self.device)
        self.joined: dict[int, Message] = {}  # client -> its join request
        self.measured: dict[str, Scores] = {}  # of the clients that trained last
        self.scored: tuple[Any, dict[str, Scores]] = ((), {})  # the last `downs` to be scored, and their scores
        self.scored_globally: tuple[Any, dict[str, Scores]] = ((), {})  # the last global model, and its scores

    def join(self, welcome: tree.Tree) -> None:
        self._wait_for_clients(self.everyone.tolist())
        tensors = tree.flatten(welcome)
        for client in range(self.num_clients):
            self.joined[client] = self.agreement.request(Header("join", client=client, base=""), tensors)
        self._advance(self.joined.values())
        self._ask(self.joined)

    def begin(self, clients: Tensor, downs: Any, turn: Turn) -> Returned:
        self._wait_for_clients(clients.tolist())
        answers = self._ask(self._requests("train", clients, downs, turn))
        ids = sorted(answers)
        silent = tuple(i for i in clients.tolist() if i not in answers)
        self._advance(answers[i][0] for i in ids)
        if turn.measured:
            self.measured = self._scores({i: received.tensors for i, (_, received) in answers.items()})
        ups = tree.stack([self.agreement.up_of(answers[i][1].tensors) for i in ids]) if ids else ()
        return Returned(torch.tensor(ids, dtype=torch.int64), ups, torch.ones(len(ids), dtype=torch.bool), silent)

    def finish(self, clients: Tensor, downs: Any, turn: Turn) -> None:
        answers = self._ask(self._requests("finish", clients, downs, turn))
        self._advance(request for request, _ in answers.values())

    def score(self, clients: Tensor, downs: Any, split: str) -> Scores:
        """One request evaluates all splits; later calls with the same `downs` reuse its answers."""
        if self.scored[0] is not downs:
            answers = self._ask(self._requests("score", clients, downs, Turn(-1)))
            self.scored = downs, self._scores({i: received.tensors for i, (_, received) in answers.items()})
        return self.scored[1][split]

    def score_trained(self, downs: Any, returned: Returned, split: str) -> Scores:
        return self.measured[split]

    def score_global(self, server: Any, split: str) -> Scores | None:
        """Devices evaluate the global model on their samples: it is sent once, for all clients and splits."""
        if self.test is not None and split == "test":
            return self.test.score(self.method, self.model, server)
        if not self.agreement.global_model.entries:
            return None
        if self.scored_globally[0] is not server:
            try:
                shared = self.agreement.global_message(server)
            except (KeyError, ValueError) as error:
                log.warning("the global model is not evaluated: its tensors are not those of the start: %s", error)
                return None
            headers = (Header("score_global", client=i, base=self.version(i)) for i in range(self.num_clients))
            answers = self._ask({h.client: self.agreement.request(h, {}, shared) for h in headers})
            self.scored_globally = server, self._scores({i: found.tensors for i, (_, found) in answers.items()})
        return self.scored_globally[1][split]

    def close(self) -> None:
        self.transport.close()

    def check(self, received: Received) -> None:
        """Raise `InvalidAnswer` for an answer that contradicts the client's hello or a declared range."""
        client = received.header.client
        for split, sizes in self.held.items():
            total = float(received.tensors[split][1]) if split in received.tensors else 0.0
            if total not in (0.0, sizes[client]):  # 0: the device does not report scores
                raise InvalidAnswer(f"scores of {total:g} {split} samples, but the client announced {sizes[client]}")
        if received.header.kind == "train":
            up = tree.apply(lambda t: t[None], self.agreement.up_of(received.tensors))
            if fault := ranges.fault(up, self.known(torch.tensor([client]))):
                raise InvalidAnswer(fault)

    def version(self, client: int) -> str:
        """The version of this client's state."""
        return bytes(self.states[client]["version"].tolist()).hex()

    def label(self, client: int) -> str:
        """The client's number, and its name if it has one."""
        return f"{client} ({self.names[client]})" if self.names and self.names[client] else str(client)

    def _advance(self, requests: Iterable[Message]) -> None:
        """Set the versions of clients to those after these requests."""
        for request in requests:
            made = torch.tensor(list(bytes.fromhex(request.header.made)), dtype=torch.uint8)
            self.states[request.header.client] = {"version": made}

    def _requests(self, kind: str, clients: Tensor, downs: Any, turn: Turn) -> dict[int, Message]:
        shared = self.agreement.shared_message(tree.pick(downs, 0)) if self.agreement.shared.entries else b""
        requests = {}
        for row, client in enumerate(clients.tolist()):
            header = Header(kind, client=client, round=turn.round, rate=turn.rate, base=self.version(client))
            header = header._replace(measure=int(kind == "train" and turn.measured))
            requests[client] = self.agreement.request(header, tree.flatten(tree.pick(downs, row)), shared)
        return requests

    def _wait_for_clients(self, clients: list[int]) -> None:
        """Wait until enough of these clients are ready; all of them, when they join for the first time."""
        max_missing = self.max_missing if self.joined or self.resumed else 0.0
        needed = max(len(clients) - int(max_missing * len(clients)), 1)
        start, warned = time.monotonic(), False
        while len(missing := [i for i in clients if not self.transport.is_ready(i)]) > len(clients) - needed:
            ready = f"{len(clients) - len(missing)} of {len(clients)} clients are ready, {needed} are needed"
            waited = time.monotonic() - start
            if not warned and waited > QUIET:
                log.warning("waiting for devices: %s; missing: %s", ready, self._status(missing))
                warned = True
            if waited > self.timeouts.wait:
                raise CoterieError(
                    f"timed out waiting for devices after {self.timeouts.wait:g} s (--wait): {ready}; missing: "
                    f"{self._status(missing)}"
                )
            self.transport.receive(min(1.0, self.timeouts.wait))

    def _status(self, clients: list[int], most: int = 20) -> str:
        """Clients, and the state of their devices."""
        found = [f"client {self.label(client)}, {self.transport.device_status(client)}" for client in clients[:most]]
        return "; ".join(found) + (f"; and {len(clients) - most} more" if len(clients) > most else "")

    def _ask(self, requests: dict[int, Message]) -> dict[int, tuple[Message, Received]]:
        """Send requests; for each client that answered in time, its last request and the answer."""
        pending = PendingRequests(
            requests, self.agreement, self.transport, self.timeouts, self.check, self.joined, self.label
        )
        try:
            pending.wait()
        finally:
            self._advance(pending.rejoined.values())
            pending.log_failures()
        return pending.answers

    def _scores(self, tensors: dict[int, tree.Tree]) -> dict[str, Scores]:
        ids = sorted(tensors)
        found = {}
        for split in self.splits:
            rows = [tensors[i][split] for i in ids]
            table = torch.stack(rows) if rows else torch.zeros(0, 3, dtype=torch.float64)
            correct, total, loss = table.unbind(1)
            found[split] = Scores(torch.tensor(ids, dtype=torch.int64), correct, total.long(), loss)
        return found
