"""The federated loop: draw participants, send, train, receive, measure."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.clients import Answers, Clients, Scores, Turn
from coterie.clients.base import Returned, send
from coterie.core import hope, order, stacks, tree
from coterie.core.errors import CoterieError, Diverged
from coterie.federation.history import PATIENCE, History, Round

log = logging.getLogger("coterie")
ALIGNMENT = 64  # bytes, of memory that torch gives
Point = tuple[str, str]  # where it is measured, and on which split
HINT = (
    "round %d: for %d measured rounds no model was better than guessing the commonest class (%.1f %%); training "
    "diverged, or does not begin: try another learning rate"
)
SEEDS = 1 << 63  # how many there are


@dataclass(frozen=True)
class Settings:
    """How a federation is run, whatever the method."""

    rounds: int = field(default=200, metadata={"help": "communication rounds", "flags": ("rounds", "gr")})
    join_ratio: float = field(
        default=1.0, metadata={"help": "share of clients in a round", "flags": ("join-ratio", "jr")}
    )
    full_last_round: bool = field(
        default=False, metadata={"help": "after the last round all clients train once more and are measured"}
    )
    lr_decay: float = field(default=1.0, metadata={"help": "factor on the learning rate, every round"})
    lr_steps: tuple[tuple[int, float], ...] = field(
        default=(), metadata={"help": "factors on the learning rate from a round on, as 50:0.2,75:0.02"}
    )
    new_clients: float = field(
        default=0.0, metadata={"help": "share of clients that do not train, and are met at the end"}
    )
    evaluate_every: int = field(
        default=1, metadata={"help": "rounds between measurements; the last is always measured"}
    )
    seed: int = field(default=0, metadata={"help": "seed of all randomness"})

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise CoterieError(f"rounds must be at least 1, not {self.rounds}")
        if not 0 < self.join_ratio <= 1:
            raise CoterieError(f"the join ratio must be above 0 and at most 1, not {self.join_ratio}")
        if not 0 <= self.new_clients < 1:
            raise CoterieError(f"the share of new clients must be at least 0 and below 1, not {self.new_clients}")
        if self.evaluate_every < 1:
            raise CoterieError(f"rounds between measurements must be at least 1, not {self.evaluate_every}")
        if not 0 <= self.seed < SEEDS:
            raise CoterieError(f"the seed must be at least 0 and below {SEEDS}, not {self.seed}")
        for name, factor in (("decay", self.lr_decay), *((f"factor from round {at} on", f) for at, f in self.lr_steps)):
            if not 0 <= factor < math.inf:
                raise CoterieError(f"the learning rate's {name} must be at least 0 and finite, not {factor}")

    def rate(self, round: int) -> float:
        """Factor on the learning rate in round 0, 1, ..."""
        steps = [factor for start, factor in sorted(self.lr_steps) if round >= start]
        return self.lr_decay**round * (steps[-1] if steps else 1.0)

    def joining(self, clients: int) -> int:
        return max(int(self.join_ratio * clients + 1e-9), 1)


@dataclass(frozen=True)
class Safety:
    """What is lost if something goes wrong. It never changes what comes out."""

    checkpoint_every: int = field(
        default=1, metadata={"help": "rounds between checkpoints, from which `coterie resume` goes on; 0: none"}
    )
    max_left_out: float = field(
        default=0.5, metadata={"help": "share of a round's clients that may send numbers that are not finite"}
    )

    def __post_init__(self) -> None:
        if self.checkpoint_every < 0:
            raise CoterieError(f"rounds between checkpoints must be at least 0, not {self.checkpoint_every}")
        if not 0 <= self.max_left_out <= 1:
            raise CoterieError(f"the share that may be left out must be between 0 and 1, not {self.max_left_out}")


class Clock:
    """Seconds by phase. A GPU tells its own, by events between its work: nobody waits for it there."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.spans: list[tuple[str, Any, Any]] = []  # phase, when it began, when it ended

    @contextmanager
    def time(self, phase: str) -> Iterator[None]:
        start = self.now()
        yield
        self.spans.append((phase, start, self.now()))

    def now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def between(self, start: Any, end: Any) -> float:
        if self.device.type != "cuda":
            return float(end - start)
        end.synchronize()  # at the end of a round, no wait
        return float(start.elapsed_time(end)) / 1000

    @property
    def seconds(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for phase, start, end in self.spans:
            found[phase] = found.get(phase, 0.0) + self.between(start, end)
        return found


class Told(NamedTuple):
    """What is recorded of a round; on the device, until it is fetched."""

    trained: dict[Point, Scores]  # of all that answered
    scores: dict[Point, Scores]
    report: tree.Tree = {}  # noqa: RUF012


def federate(
    clients: Clients,
    settings: Settings,
    watch: Callable[[Round], None] = lambda record: None,
    *,
    restore: Callable[[Any], tuple[Any, History]] = lambda server: (server, History()),
    between: Callable[[Any, History], None] = lambda server, history: None,
    max_left_out: float = Safety.max_left_out,
) -> tuple[Any, History]:
    """The server's last state, and what happened. `watch` sees every round when it ends.

    restore: turns the server's first state into that of a run that was stopped, with what happened so far. between:
    is given these two after every round.
    """
    method = clients.method
    server = method.server_init(clients.model, clients.census)
    clients.join(method.server_welcome(server))
    server, history = restore(server)

    def note(record: Round) -> None:
        history.append(record)
        watch(record)
        if history.stuck(clients.chance):
            log.warning(HINT, record.number, PATIENCE, 100 * clients.chance)

    for number in range(len(history), settings.rounds):
        server, record = play(server, clients, settings, number, max_left_out)
        note(record)
        between(server, history)
    if settings.full_last_round and settings.join_ratio < 1:
        note(last_training(server, clients, settings, max_left_out))
    if method.finishes:
        note(finish(server, clients, settings))
    return server, history


def play(
    server: Any, clients: Clients, settings: Settings, number: int, max_left_out: float = Safety.max_left_out
) -> tuple[Any, Round]:
    """One round."""
    clock, trained = Clock(clients.device), dict[Point, Scores]()
    measured = (number + 1) % settings.evaluate_every == 0 or number + 1 == settings.rounds
    turn = Turn(number, settings.rate(number), measured)
    joined = order.participants(settings.seed, number, clients.count, settings.joining(clients.count))
    with clock.time("send"):
        downs = send(clients.method, server, joined)
    with clock.time("train"):
        returned = clients.begin(joined, downs, turn)
    if measured:
        with clock.time("evaluate"):
            trained = after_training(clients, downs, returned)

    def settle(answers: Answers) -> tuple[Any, Told]:
        with clock.time("receive"):
            after = tree.apply(aligned, receive(server, clients, answers, number + 1))
        report = clients.method.server_report(after)
        if not measured:
            return after, Told(trained, {}, report)
        with clock.time("evaluate"):
            return after, Told(trained, as_downloaded(after, clients), report)

    answers, after, told = settled(returned, turn, max_left_out, settle)
    return after, Round(
        number + 1,
        joined,
        absent(answers),
        usable(told.trained, answers) | told.scores,
        bytes_up=tree.size(answers.ups),
        bytes_down=tree.size(downs),
        seconds=clock.seconds,
        report=told.report,
    )


def settled(
    returned: Returned, turn: Turn, max_left_out: float, settle: Callable[[Answers], tuple[Any, Told]]
) -> tuple[Answers, Any, Told]:
    """The answers that can be used, what the server makes of them, and what is told of it, with one wait for a GPU.

    While only the GPU knows which can be used, all are settled: nearly always that is right. Where it was not, or
    failed, or something else was hoped in vain, those that can be used are settled once more, without hope. So
    `settle` must have no effect but what it returns.
    """
    hoped: tuple[Any, Told] | None = None
    conditions: list[Tensor] = []
    if not at_hand(returned.finite):
        try:
            with hope.collected() as conditions:
                hoped = settle(returned.whole())
        except Exception:  # if it is not for numbers that are not finite, it comes again
            log.debug("round %d: hoped in vain", turn.round + 1, exc_info=True)
    finite, told, held = tree.fetched((returned.finite, hoped[1] if hoped else Told({}, {}), tuple(conditions)))
    answers = sift(returned._replace(finite=finite), turn, max_left_out)
    if hoped and not answers.left_out and all(held):
        return answers, hoped[0], told
    if not all(held):
        log.debug("round %d: the server does its part again, %s did not hold", turn.round + 1, held)
    hoped = None  # it may be large
    after, told = settle(answers)
    return answers, after, tree.fetched(told)


def at_hand(t: Tensor) -> bool:
    """Whether nobody has to wait for it."""
    return t.device.type == "cpu"


def receive(server: Any, clients: Clients, answers: Answers, number: int) -> Any:
    try:
        with stacks.current(clients.device):
            return clients.method.server_receive(server, on(clients, answers.clients), answers.ups)
    except ValueError as error:  # such as a negative variance: legal in form, and nonsense
        raise CoterieError(
            f"round {number}: the server cannot use what clients sent: {error}. If somebody may send nonsense, "
            "--robust clip pulls it in"
        ) from error


def sift(returned: Returned, turn: Turn, max_left_out: float = 1.0) -> Answers:
    """The answers that can be used; an error if there are none, or too few."""
    answers, number = returned.sift(), turn.round + 1
    for client in answers.left_out:
        log.warning("round %d: client %d is left out, its update is not finite", number, client)
    answered = len(returned.clients)
    out, asked = len(answers.left_out) + len(answers.silent), answered + len(answers.silent)
    if answered and not len(answers.clients):
        raise Diverged(
            f"round {number}: no client sent a finite update, so training diverged; try a smaller learning rate"
        )
    if not answered or (answers.silent and out > max_left_out * asked):
        raise CoterieError(
            f"round {number}: {len(answers.silent)} of {asked} clients did not answer, more than the share of "
            f"{max_left_out:g} that may be missing"
        )
    if out > max_left_out * asked:
        raise Diverged(
            f"round {number}: {out} of {asked} clients sent an update that is not finite, more than the share "
            f"of {max_left_out:g} that may be left out; try a smaller learning rate, or another --max-left-out"
        )
    return answers


def absent(answers: Answers) -> tuple[int, ...]:
    return tuple(sorted((*answers.left_out, *answers.silent)))


def after_training(clients: Clients, downs: Any, returned: Returned) -> dict[Point, Scores]:
    return {("post", split): clients.score_trained(downs, returned, split) for split in clients.splits}


def as_downloaded(server: Any, clients: Clients) -> dict[Point, Scores]:
    """PRE on all clients, and the global model where there is one."""
    everyone = clients.everyone
    downs = send(clients.method, server, everyone)
    found = {("pre", split): clients.score(everyone, downs, split) for split in clients.splits}
    for split in clients.splits:
        if clients.method.personal_is_global:
            found["global", split] = found["pre", split]
        elif (scores := clients.score_global(server, split)) is not None:
            found["global", split] = scores
    return found


def last_training(server: Any, clients: Clients, settings: Settings, max_left_out: float) -> Round:
    """All clients train once more from the final server state, which stays as it is."""
    everyone, clock = clients.everyone, Clock(clients.device)
    downs = send(clients.method, server, everyone)
    turn = Turn(settings.rounds, settings.rate(settings.rounds))
    with clock.time("train"):
        returned = clients.begin(everyone, downs, turn)

    def settle(answers: Answers) -> tuple[Any, Told]:
        with clock.time("evaluate"):
            trained = after_training(clients, downs, returned)
            splits = [] if clients.method.finishes else clients.splits  # what follows is kept instead
            return server, Told(trained, {("kept", split): clients.score(everyone, downs, split) for split in splits})

    answers, _, told = settled(returned, turn, max_left_out, settle)
    scores = usable(told.trained, answers) | told.scores
    return Round(settings.rounds + 1, everyone, absent(answers), scores, 0, tree.size(downs), clock.seconds)


def finish(server: Any, clients: Clients, settings: Settings) -> Round:
    everyone, clock = clients.everyone, Clock(clients.device)
    downs = send(clients.method, server, everyone)
    turn = Turn(settings.rounds, settings.rate(settings.rounds - 1))
    with clock.time("finish"):
        clients.finish(everyone, downs, turn)
    with clock.time("evaluate"):
        scores = {("finished", split): clients.score(everyone, downs, split) for split in clients.splits}
    return Round(settings.rounds, everyone, (), tree.fetched(scores), seconds=clock.seconds)


def usable(scores: dict[Point, Scores], answers: Answers) -> dict[Point, Scores]:
    """Of those only whose answers could be used."""
    if not answers.left_out:
        return scores
    return {point: Scores(*(t[torch.isin(of.clients, answers.clients)] for t in of)) for point, of in scores.items()}


def aligned(t: Tensor) -> Tensor:
    """The same as it would come from a checkpoint: where it lies in memory decides about the last bit of sums."""
    return t if t.is_contiguous() and t.data_ptr() % ALIGNMENT == 0 else t.clone(memory_format=torch.contiguous_format)


def on(clients: Clients, ids: Tensor) -> Tensor:
    """The same on the device of the clients."""
    return ids.to(clients.device, non_blocking=True)
