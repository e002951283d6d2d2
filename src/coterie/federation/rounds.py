"""The federated loop: draw participants, send, train, receive, evaluate."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.core import random, ranges, tree
from coterie.core.errors import CoterieError, Diverged
from coterie.execution import Answers, Backend, Scores, Turn
from coterie.execution.answers import NOT_FINITE, Returned
from coterie.execution.requests import send
from coterie.federation.culprits import Receive, received
from coterie.federation.ending import Ending, reported_point
from coterie.federation.history import PATIENCE, Ended, History, Round
from coterie.federation.settings import Safety, Settings
from coterie.federation.timing import PhaseTimer
from coterie.gpu import devices, optimistic

log = logging.getLogger("coterie")
ALIGNMENT = 64  # bytes, of memory that torch allocates
Point = tuple[str, str]  # (point of measurement, split)
HINT = (
    "round %d: in %d measured rounds no model was better than %s (%s); training diverged or does not start: try "
    "another learning rate"
)


class Measurements(NamedTuple):
    """Scores and report of a round; on the device until they are fetched."""

    trained: dict[Point, Scores]  # of all clients that answered
    scores: dict[Point, Scores]
    report: tree.Tree = {}  # noqa: RUF012


def federate(
    backend: Backend,
    settings: Settings,
    watch: Callable[[Round], None] = lambda record: None,
    *,
    restore: Callable[[Any], tuple[Any, History]] = lambda server: (server, History()),
    between: Callable[[Any, History], None] = lambda server, history: None,
    max_left_out: float = Safety.max_left_out,
    ending: Ending = Ending(),  # noqa: B008
) -> tuple[Any, History]:
    """Run all rounds; return the server's last state and the history. `watch` is called with every finished round.

    restore: returns the server's state and history of an interrupted run, given the first state. between: called with
    both after every round; `history.ended` is set after the last one. ending: conditions that end the run early.
    """
    method, start = backend.method, time.monotonic()
    server = method.server_init(backend.model, backend.census)
    backend.join(method.server_welcome(server))
    server, history = restore(server)
    point = reported_point(method.results, settings.joining(backend.num_clients) == backend.num_clients)

    def ended(records: Sequence[Round]) -> Ended | None:
        if len(records) >= settings.rounds:
            return Ended("rounds", len(records))
        return ending.reached(records, point, time.monotonic() - start) if records else None

    def note(record: Round) -> None:
        history.append(record)
        watch(record)
        if backend.chance is not None and history.stuck(backend.chance):
            metric = backend.metric
            guess = f"{'majority-class' if backend.model.task.one_class else 'constant'} {metric.words}"
            log.warning(HINT, record.number, PATIENCE, guess, metric.text(backend.chance, 1))

    history.ended = ended(history)
    while not history.ended:
        server, record = play(server, backend, settings, len(history), max_left_out)
        history.ended = ended([*history, record])
        if history.ended and not record.scores:  # the last round is always evaluated
            record = replace(record, scores=tree.fetched(as_downloaded(server, backend)))
        note(record)
        between(server, history)
    last, rates = history.ended.round, method.train.rates
    if settings.full_last_round and settings.join_ratio < 1:
        turn = Turn(last, rates.over_rounds(last, settings.rounds))
        note(last_training(server, backend, turn, max_left_out))
    if method.finishes:
        note(finish(server, backend, Turn(last, rates.over_rounds(last - 1, settings.rounds))))
    return server, history


def play(
    server: Any, backend: Backend, settings: Settings, number: int, max_left_out: float = Safety.max_left_out
) -> tuple[Any, Round]:
    """Run one round: the server's next state, and the record of the round."""
    timer, trained = PhaseTimer(backend.device), dict[Point, Scores]()
    measured = (number + 1) % settings.evaluate_every == 0 or number + 1 == settings.rounds
    turn = Turn(number, backend.method.train.rates.over_rounds(number, settings.rounds), measured)
    count = settings.joining(backend.num_clients, number)
    joined = random.participants(settings.seed, number, backend.num_clients, count)
    with timer.time("send"):
        downs = send(backend.method, server, joined)
    with timer.time("train"):
        returned = backend.begin(joined, downs, turn)
    if measured:
        with timer.time("evaluate"):
            trained = after_training(backend, downs, returned)

    def take(answers: Answers) -> Any:
        with timer.time("receive"):
            return tree.apply(aligned, receive(server, backend, answers, random.server_key(settings.seed, number)))

    def measure(after: Any) -> Measurements:
        report = backend.method.server_report(after)
        if not measured:
            return Measurements(trained, {}, report)
        with timer.time("evaluate"):
            return Measurements(trained, as_downloaded(after, backend), report)

    answers, after, found = settled(returned, turn, max_left_out, take, measure)
    return after, Round(
        number + 1,
        joined,
        absent(answers),
        usable(found.trained, answers) | found.scores,
        bytes_up=tree.size(answers.ups),
        bytes_down=tree.size(downs),
        seconds=timer.seconds,
        report=found.report,
        metric=backend.metric,
    )


def settled(
    returned: Returned, turn: Turn, max_left_out: float, take: Receive, measure: Callable[[Any], Measurements]
) -> tuple[Answers, Any, Measurements]:
    """The usable answers, the server's next state and its measurements, with one synchronization of a GPU.

    As long as only the GPU knows which answers can be used, all are taken optimistically, which is nearly always right.
    If it was not, or a condition does not hold, the step is repeated with the usable answers and all checks. So `take`
    and `measure` must be pure.
    """
    attempt: tuple[Any, Measurements] | None = None
    conditions: list[Tensor] = []
    if not known_on_cpu(returned.finite):
        try:
            with optimistic.collected() as conditions:
                after = take(returned.whole())
                attempt = after, measure(after)
                optimistic.expect(ranges.finite(after))
        except Exception:  # an error that is not due to unusable answers is raised again below
            log.debug("round %d: optimistic step discarded", turn.round + 1, exc_info=True)
    finite, measured, held = tree.fetched(
        (returned.finite, attempt[1] if attempt else Measurements({}, {}), tuple(conditions))
    )
    answers = sift(returned._replace(finite=finite), turn, max_left_out)
    if attempt and not answers.left_out and all(held):
        return answers, attempt[0], measured
    if not all(held):
        log.debug("round %d: optimistic step discarded, conditions %s", turn.round + 1, held)
    attempt = None  # it may be large
    answers, after = received(answers, take, turn.round + 1, max_left_out)
    return answers, after, tree.fetched(measure(after))


def known_on_cpu(t: Tensor) -> bool:
    """Whether reading it needs no synchronization."""
    return t.device.type == "cpu"


def receive(server: Any, backend: Backend, answers: Answers, key: Tensor) -> Any:
    """The server's next state. key: () random key of its training."""
    method = backend.method
    with devices.selected(backend.device):
        ids, key = (t.to(backend.device, non_blocking=True) for t in (answers.clients, key))
        after = method.server_receive(server, ids, answers.ups)
        return method.server_train(backend.model, after, key) if method.trains_on_server else after


def sift(returned: Returned, turn: Turn, max_left_out: float = 1.0) -> Answers:
    """The usable answers; an error if there are none or too few."""
    answers, number = returned.sift(), turn.round + 1
    for client in answers.left_out:
        log.warning("round %d: client %d is left out, %s", number, client, returned.fault(client))
    answered = len(returned.clients)
    out, selected = len(answers.left_out) + len(answers.silent), answered + len(answers.silent)
    reasons = {returned.fault(client) for client in answers.left_out}
    if answered and not len(answers.clients) and reasons == {NOT_FINITE}:
        raise Diverged(
            f"round {number}: no client sent a finite update, so training diverged; try a smaller learning rate"
        )
    if not answered or (answers.silent and out > max_left_out * selected):
        raise CoterieError(
            f"round {number}: {len(answers.silent)} of {selected} clients did not answer, more than the share of "
            f"{max_left_out:g} that may be missing"
        )
    if (answered and not len(answers.clients)) or (out > max_left_out * selected and reasons != {NOT_FINITE}):
        first = answers.left_out[0]
        grown = all(reason == NOT_FINITE or reason.endswith(ranges.BEYOND) for reason in reasons)
        raise (Diverged if grown else CoterieError)(
            f"round {number}: {out} of {selected} clients are left out, more than the share of {max_left_out:g} that "
            f"may be (--max-left-out); client {first}: {returned.fault(first)}"
        )
    if out > max_left_out * selected:
        raise Diverged(
            f"round {number}: {out} of {selected} clients sent an update that is not finite, more than the share "
            f"of {max_left_out:g} that may be left out; try a smaller learning rate, or another --max-left-out"
        )
    return answers


def absent(answers: Answers) -> tuple[int, ...]:
    return tuple(sorted((*answers.left_out, *answers.silent)))


def after_training(backend: Backend, downs: Any, returned: Returned) -> dict[Point, Scores]:
    return {("post", split): backend.score_trained(downs, returned, split) for split in backend.splits}


def as_downloaded(server: Any, backend: Backend) -> dict[Point, Scores]:
    """PRE: evaluate every client's model as after the next download, and the global model if there is one."""
    everyone = backend.everyone
    downs = send(backend.method, server, everyone)
    found = {("pre", split): backend.score(everyone, downs, split) for split in backend.splits}
    for split in backend.splits:
        if backend.method.personal_is_global and not (backend.server_tests and split == "test"):
            found["global", split] = found["pre", split]
        elif (scores := backend.score_global(server, split)) is not None:
            found["global", split] = scores
    return found


def last_training(server: Any, backend: Backend, turn: Turn, max_left_out: float) -> Round:
    """All clients train once more from the final server state, which does not change."""
    everyone, timer = backend.everyone, PhaseTimer(backend.device)
    downs = send(backend.method, server, everyone)
    with timer.time("train"):
        returned = backend.begin(everyone, downs, turn)

    def measure(after: Any) -> Measurements:
        with timer.time("evaluate"):
            trained = after_training(backend, downs, returned)
            splits = [] if backend.method.finishes else backend.splits  # the final step replaces these models
            return Measurements(trained, {("kept", split): backend.score(everyone, downs, split) for split in splits})

    answers, _, found = settled(returned, turn, max_left_out, lambda answers: server, measure)
    scores = usable(found.trained, answers) | found.scores
    return Round(
        turn.round + 1,
        everyone,
        absent(answers),
        scores,
        bytes_down=tree.size(downs),
        seconds=timer.seconds,
        metric=backend.metric,
    )


def finish(server: Any, backend: Backend, turn: Turn) -> Round:
    """Run the method's final step on all clients, and evaluate them."""
    everyone, timer = backend.everyone, PhaseTimer(backend.device)
    downs = send(backend.method, server, everyone)
    with timer.time("finish"):
        backend.finish(everyone, downs, turn)
    with timer.time("evaluate"):
        scores = {("finished", split): backend.score(everyone, downs, split) for split in backend.splits}
    return Round(turn.round, everyone, (), tree.fetched(scores), seconds=timer.seconds, metric=backend.metric)


def usable(scores: dict[Point, Scores], answers: Answers) -> dict[Point, Scores]:
    """The scores of clients whose answers could be used."""
    if not answers.left_out:
        return scores
    return {point: Scores(*(t[torch.isin(of.clients, answers.clients)] for t in of)) for point, of in scores.items()}


def aligned(t: Tensor) -> Tensor:
    """t as a checkpoint would load it: contiguity and alignment decide about the last bit of sums."""
    return t if t.is_contiguous() and t.data_ptr() % ALIGNMENT == 0 else t.clone(memory_format=torch.contiguous_format)
