"""A round that does not wait to hear which answers are finite comes to the same, to the last bit, as one that does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch

from coterie.core import tree
from coterie.core.errors import CoterieError, Diverged
from coterie.execution import Answers, Turn
from coterie.execution.answers import Returned
from coterie.federation import History, Round, Settings, federate, rounds
from coterie.federation.newcomers import meet
from coterie.federation.timing import PhaseTimer
from coterie.gpu import optimistic
from coterie.privacy import Protection
from tests import toy
from tests.machines import Missing

NAN, INF = float("nan"), float("inf")


def clients_of(method: Any, spoilt: dict[int, float], first_only: bool = False, batch_norm: bool = False) -> toy.Spoilt:
    model = toy.model(batch_norm=batch_norm)
    return toy.Spoilt(method, model, toy.toy(), 7, spoilt=spoilt, first_only=first_only)


@pytest.fixture
def hoping(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the flags are not at hand."""
    monkeypatch.setattr(rounds, "known_on_cpu", lambda t: False)


def told(record: Round) -> Any:
    """All of it but times."""
    scores = {point: toy.rows(of) for point, of in record.scores.items()}
    report = {name: t.tolist() for name, t in record.report.items()}
    sent = record.bytes_up, record.bytes_down
    return record.number, record.participants.tolist(), record.left_out, scores, sent, list(record.seconds), report


def same_both_ways(make: Callable[[], toy.Spoilt], caplog: pytest.LogCaptureFixture) -> tuple[History, list[int]]:
    """What happened, and how often the server received: if it waits for the flags, and if it does not."""
    found, counts = [], []
    for waits in (True, False):
        caplog.clear()
        with (
            patch.object(rounds, "known_on_cpu", lambda t, waits=waits: waits),
            patch.object(rounds, "receive", wraps=rounds.receive) as receive,
        ):
            made, history = toy.outcome(make(), rounds=2, join_ratio=0.8, full_last_round=True)
        found.append((made, list(map(told, history)), list(caplog.messages)))
        counts.append(receive.call_count)
    toy.assert_same(found[0][0], found[1][0])
    assert found[0][1:] == found[1][1:]
    return history, counts


@pytest.mark.parametrize(
    ("name", "spoilt", "first_only", "batch_norm"),
    [
        ("fedavg", {3: NAN}, False, True),
        ("fedpac", {3: NAN}, False, False),  # its quadratic programs refuse such moments
        ("fedpac", {0: INF, 4: NAN}, True, True),  # such an encoder they do not see
        ("scaffold", {3: -INF}, False, True),
        ("fedfomo", {3: NAN}, False, False),
    ],
)
def test_those_left_out_are_left_out_alike(
    name: str,
    spoilt: dict[int, float],
    first_only: bool,
    batch_norm: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    method = toy.method(name, local_epochs=1)
    history, counts = same_both_ways(lambda: clients_of(method, spoilt, first_only, batch_norm), caplog)
    again = sum(bool(record.left_out) for record in history[:2])
    assert again
    assert counts == [2, 2 + again]  # once more, without them
    assert history[2].left_out == tuple(spoilt)
    assert [f"round 3: client {i} is left out, its update is not finite" for i in spoilt] == caplog.messages[
        -len(spoilt) :
    ]


@pytest.mark.parametrize("name", ["fedavg", "fedpac", "scaffold"])
def test_the_server_receives_once_if_all_are_finite(name: str, caplog: pytest.LogCaptureFixture) -> None:
    method = toy.method(name, local_epochs=1)
    _, counts = same_both_ways(lambda: clients_of(method, {}), caplog)
    assert counts == [2, 2]
    assert not caplog.messages


@pytest.mark.parametrize("protection", [{"robust": "clip"}, {"robust": "median"}, {"dp": "client"}])
def test_protected_methods(protection: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """The noise of a round is the same, however often it is added."""
    method = Protection(**protection).around(toy.method("fedavg", local_epochs=1), toy.model(), 4, 7)
    history, counts = same_both_ways(lambda: clients_of(method, {3: NAN}), caplog)
    assert counts[1] > counts[0]
    assert history[2].left_out == (3,)


@pytest.mark.usefixtures("hoping")
@pytest.mark.parametrize("name", ["fedavg", "fedpac"])
def test_a_run_that_diverges_says_so(name: str) -> None:
    with pytest.raises(Diverged, match=r"^round 1: no client sent a finite update, so training diverged; try"):
        toy.outcome(clients_of(toy.method(name, local_epochs=1), dict.fromkeys(range(5), NAN)))
    with pytest.raises(Diverged, match=r"^round 1: 3 of 5 clients sent an update that is not finite, more than"):
        toy.outcome(clients_of(toy.method(name, local_epochs=1), dict.fromkeys(range(3), NAN)), join_ratio=1.0)


@pytest.mark.usefixtures("hoping")
def test_too_few_answers_end_a_run() -> None:
    clients = Missing(toy.method("fedavg"), toy.model(), toy.toy(), 7, processes=1)
    clients.left_out = {1: {0, 1, 2}}
    with pytest.raises(CoterieError, match=r"^round 2: 3 of 5 clients did not answer, more than the share of 0.5"):
        federate(clients, Settings(rounds=2, seed=7))


@pytest.mark.usefixtures("hoping")
def test_nonsense_that_is_finite_is_told_as_ever() -> None:
    class Liar(type(toy.method("fedpac"))):  # type: ignore[misc]
        def client_train(self, model: Any, state: Any, down: Any, data: Any) -> Any:
            state, up = super().client_train(model, state, down, data)
            return state, up._replace(variance=-torch.ones_like(up.variance))

    with pytest.raises(
        CoterieError, match=r"round 1: . of . clients are left out.*client .: .*`variance` has -1, below 0"
    ):
        toy.outcome(clients_of(Liar(), {}))


def test_newcomers() -> None:
    method, records = toy.method("fedper", local_epochs=1), []
    server, _ = federate(clients_of(method, {}), Settings(rounds=1))
    for waits in (True, False):
        with patch.object(rounds, "known_on_cpu", lambda t, waits=waits: waits):
            records.append(told(meet(server, clients_of(method, {2: NAN}), Settings(rounds=1))))
    assert records[0] == records[1]
    assert records[0][2] == (2,)


def test_what_is_on_the_cpu_is_fetched_as_it_is() -> None:
    given = {"a": torch.ones(2), "b": (torch.zeros(3), {"c": torch.ones(())})}
    assert [t.data_ptr() for t in tree.leaves(tree.fetched(given))] == [t.data_ptr() for t in tree.leaves(given)]
    assert tree.fetched(()) == ()


def test_a_gpu_tells_its_own_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events are put between its work, and read in the end only."""
    done: list[int] = []  # milliseconds, when the events on the stream happened

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: Any) -> None:
            self.place = len(done)
            done.append([10, 30, 100, 150, 200, 300][self.place])

        def synchronize(self) -> None:
            assert len(done) == 6

        def elapsed_time(self, end: Any) -> float:
            return done[end.place] - done[self.place]

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    clock = PhaseTimer("cuda")
    for phase in ("train", "receive", "train"):
        with clock.time(phase):
            pass
    assert clock.seconds == {"train": pytest.approx(0.12), "receive": pytest.approx(0.05)}


@pytest.mark.parametrize("good", [True, False])
@pytest.mark.usefixtures("hoping")
def test_what_was_hoped_in_vain_is_done_again(good: bool) -> None:
    asked = []

    def receive(answers: Answers) -> torch.Tensor:
        asked.append(optimistic.allowed())
        if optimistic.allowed():
            optimistic.expect(torch.tensor(True))
            optimistic.expect(torch.tensor(good))
        return torch.tensor(float(not optimistic.allowed()))

    def tell(after: torch.Tensor) -> rounds.Measurements:
        return rounds.Measurements({}, {}, {"a": after})

    returned = Returned(torch.arange(2), {"w": torch.zeros(2, 3)}, torch.tensor([True, True]))
    _, made, told = rounds.settled(returned, Turn(0), 0.5, receive, tell)
    assert (made.item(), told.report["a"].item(), asked) == ((0, 0, [True]) if good else (1, 1, [True, False]))


def test_conditions_are_refused_where_no_caller_collects_them() -> None:
    assert not optimistic.allowed()
    with pytest.raises(ValueError, match="repeat"):
        optimistic.expect(torch.tensor(True))
