"""Requests that were sent and not answered yet: answers, retries, disconnections and deadlines."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from coterie.core.errors import CoterieError
from coterie.deploy.agreement import Agreement
from coterie.deploy.messages import STATE_LOST, Message, Received
from coterie.deploy.transports.interface import AnswerReceived, DeviceConnected, DeviceDisconnected, Transport
from coterie.deploy.wire import InvalidAnswer, Refused

log = logging.getLogger("coterie")
OUTCOMES = {
    "join": "did not join",
    "train": "did not train",
    "score": "was not evaluated",
    "score_global": "did not evaluate the global model",
    "finish": "did not finish",
}


@dataclass(frozen=True)
class Timeouts:
    """How long the server waits, in seconds."""

    deadline: float = field(default=600.0, metadata={"help": "seconds that clients have for an answer"})
    grace: float = field(default=30.0, metadata={"help": "seconds that a disconnected device has to reconnect"})
    wait: float = field(default=3600.0, metadata={"help": "seconds to wait for enough devices"})

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise CoterieError(f"--{name} must be more than 0 seconds, got {value:g}")


class PendingRequests:
    """Waits until all requests are answered, or their clients are given up."""

    def __init__(
        self,
        requests: dict[int, Message],
        agreement: Agreement,
        transport: Transport,
        timeouts: Timeouts,
        check: Callable[[Received], None],
        joined: dict[int, Message],
        label: Callable[[int], str] = str,
    ) -> None:
        """requests: by client. check: raises `InvalidAnswer` for an unacceptable answer.

        joined: the join request of each client, for clients that lost their state.
        """
        self.agreement, self.transport, self.timeouts = agreement, transport, timeouts
        self.check, self.joined, self.label = check, joined, label
        self.waiting = dict(requests)
        self.answers: dict[int, tuple[Message, Received]] = {}
        self.reasons: dict[int, str] = {}  # client -> why it was given up
        self.expires: dict[int, float] = {}  # client that disconnected or sent an invalid answer -> when it is given up
        self.faults: dict[int, str] = {}  # client -> what was wrong with its answer
        self.after_join: dict[int, Message] = {}  # client that joins again -> the request that follows
        self.rejoined: dict[int, Message] = {}  # client that joined again -> its join request
        self.retried: set[int] = set()  # clients that were asked to join again
        self.header = next(iter(requests.values())).header
        self.end = time.monotonic() + timeouts.deadline
        transport.announce_phase(self.header.kind, self.header.round, list(requests), timeouts.deadline)

    def wait(self) -> None:
        for client, request in list(self.waiting.items()):
            if self.transport.is_ready(client):
                self.transport.send(client, request)
            elif (until := self.transport.last_seen(client) + self.timeouts.grace) > time.monotonic():
                self.expires[client] = until
            else:
                self._drop(client, "its device is not connected")
        while self.waiting:
            left = min([self.end, *self.expires.values()]) - time.monotonic()
            match self.transport.receive(max(left, 0.0)):
                case AnswerReceived(client, message):
                    self.take(client, message)
                case DeviceConnected(clients):
                    for client in self.waiting.keys() & set(clients):
                        self.expires.pop(client, None)
                        self.transport.send(client, self.waiting[client])
                case DeviceDisconnected(clients):
                    until = time.monotonic() + self.timeouts.grace
                    self.expires |= dict.fromkeys(self.waiting.keys() & set(clients), until)
            self._drop_expired()

    def log_failures(self) -> None:
        where = f"round {self.header.round + 1}: " if self.header.round >= 0 else ""
        for client, reason in sorted(self.reasons.items()):
            log.warning("%sclient %s %s: %s", where, self.label(client), OUTCOMES[self.header.kind], reason)

    def take(self, client: int, message: bytes) -> None:
        """Validate an answer. A refused one leaves its request pending."""
        request = self.waiting.get(client)
        if request is None:
            log.debug("ignored an answer of client %d without a pending request", client)
            return
        try:
            received = self.agreement.open_answer(message, request.header)
            self.check(received)
        except Refused as reason:
            log.warning("refused a message of client %d: %s", client, reason)
            self.transport.report_refusal(client, str(reason))
            if isinstance(reason, InvalidAnswer):  # it may be forged: allow time for the real answer
                self.faults[client] = f"its answer was refused: {reason}"
                self.expires.setdefault(client, time.monotonic() + self.timeouts.grace)
            return
        if received.header.kind == "error":
            if received.header.note == STATE_LOST and client not in self.retried:
                self._rejoin(client, request)
            else:
                self._drop(client, received.header.note or "unknown error")
        elif client in self.after_join:
            self.rejoined[client] = request
            self._send(client, self.after_join.pop(client))
        else:
            self.answers[client] = request, received
            self.waiting.pop(client)
            self.expires.pop(client, None)

    def _drop_expired(self) -> None:
        now = time.monotonic()
        if now >= self.end:
            for client in list(self.waiting):
                self._drop(client, self.faults.get(client, f"no answer within {self.timeouts.deadline:g} s"))
        for client in [client for client, until in self.expires.items() if now >= until]:
            self._drop(client, self.faults.get(client, "its device disconnected"))

    def _drop(self, client: int, reason: str) -> None:
        self.reasons[client] = reason
        self.waiting.pop(client, None)
        self.expires.pop(client, None)

    def _rejoin(self, client: int, request: Message) -> None:
        """The device lost the client's state: the client joins again, then gets the same request from there."""
        log.warning("client %d starts over: %s", client, STATE_LOST)
        join = self.joined[client]
        tensors = self.agreement.open_request(request.own, request.shared).tensors
        header = request.header._replace(base=join.header.made, made="")
        self.retried.add(client)
        self.after_join[client] = self.agreement.request(header, tensors, request.shared)
        self._send(client, join)

    def _send(self, client: int, request: Message) -> None:
        self.waiting[client] = request
        self.transport.send(client, request)
