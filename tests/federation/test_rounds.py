"""The loop: who joins, what is measured where, what it comes to."""

from __future__ import annotations

import pytest
import torch

import coterie
from coterie.core import random, tree
from coterie.core.errors import CoterieError
from coterie.execution import Looped, Scores, Stacked
from coterie.federation import History, Round, Settings, Summary, federate
from tests import toy


def scores(correct: list[int], total: list[int]) -> Scores:
    n = len(correct)
    return Scores(torch.arange(n), torch.tensor(correct), torch.tensor(total), torch.ones(n, dtype=torch.float64))


def test_summary_by_hand() -> None:
    """Accuracies 1, 1/2, 1/4 on 10, 20, 40 samples."""
    found = Summary.of(scores([10, 10, 10], [10, 20, 40]))
    assert found.mean == pytest.approx(7 / 12)
    assert found.by_samples == pytest.approx(30 / 70)
    assert found.std == pytest.approx(((25 + 1 + 16) / 144 / 3) ** 0.5)
    assert found.worst10 == pytest.approx(1 / 4)


def test_a_final_step_is_not_a_round() -> None:
    result = coterie.run(toy.method("fedavg"), toy.toy(), toy.network(), rounds=2, backend=toy.IN_TURN, progress=False)
    first, *lines = repr(result.history).splitlines()
    assert first == "History of 2 rounds"
    assert [line.split(":")[0].strip() for line in lines] == ["Round 1", "Round 2", "After round 2"]


def test_worst_tenth_of_thirty_clients_is_three() -> None:
    found = Summary.of(scores(list(range(30)), [100] * 30))
    assert found.worst10 == pytest.approx((0 + 1 + 2) / 300)


def test_clients_without_test_samples_do_not_count() -> None:
    assert Summary.of(scores([3, 0], [4, 0])).mean == pytest.approx(3 / 4)
    assert Summary.of(scores([0], [0])).mean != Summary.of(scores([0], [0])).mean  # not a number


@pytest.mark.parametrize("kind", [Looped, Stacked])
def test_a_client_without_test_samples_takes_part(kind: type[Looped] | type[Stacked]) -> None:
    clients = kind(toy.method("fedper"), toy.model(), toy.toy(test=(7, 0, 3, 11, 4)), 0)
    _, history = federate(clients, Settings(rounds=1))
    assert history[-1].scores["pre", "test"].total.tolist() == [7, 0, 3, 11, 4]
    clients.close()


def test_outcomes_are_named_for_what_they_are() -> None:
    """Test accuracies 0.5, 0.9, 0.7; validation 0.2, 0.3, 0.6."""
    history = History()
    for number, (test, held) in enumerate([(5, 2), (9, 3), (7, 6)], start=1):
        found = {("pre", "test"): scores([test], [10]), ("pre", "validation"): scores([held], [10])}
        history.append(Round(number, torch.tensor([0]), scores=found))
    outcome = history.outcome("X", "pre")
    assert outcome is not None
    assert outcome.last.mean == pytest.approx(0.7)
    assert outcome.best_on_test == pytest.approx(0.9)
    assert outcome.by_validation == pytest.approx(0.7)
    assert history.outcome("X", "global") is None


def test_pre_post_and_global_are_what_they_say() -> None:
    """Measured again by hand from the server's state and plain tensors."""
    data, model, method = toy.toy(), toy.model(), toy.method("fedper", average_heads=True)
    clients = Looped(method, model, data, 7, processes=1)
    server, history = federate(clients, Settings(rounds=2, seed=7, join_ratio=0.6))
    for i in range(5):
        x, y = data.test.client(i)
        x = (x.double() / 255 - 0.5) / 0.5
        encoder, head = toy.network().double()[:-1], toy.network().double()[-1]  # type: ignore[index]
        encoder.load_state_dict(server.shared.encoder)
        for point, weights in (("pre", clients.states[i].personal.head), ("global", server.personal.head)):
            head.load_state_dict(weights)
            right = int((head(encoder(x)).argmax(1) == y).sum())
            assert int(history[-1].scores[point, "test"].weighted[i]) == right
    joined = random.participants(7, 1, 5, 3)
    assert history[-1].scores["post", "test"].clients.tolist() == joined.tolist()


def test_participation() -> None:
    assert [Settings(join_ratio=c).joining(100) for c in (1.0, 0.3, 0.001)] == [100, 30, 1]
    assert Settings(join_ratio=0.29).joining(100) == 29  # 0.29 * 100 is 28.999...


def test_the_schedule_reaches_the_clients() -> None:
    data, model = toy.toy(), toy.model()
    half, _ = toy.looped(toy.method("fedavg", lr=0.1, schedule="steps:0=0.5"), model, data, rounds=1)
    plain, _ = toy.looped(toy.method("fedavg", lr=0.05), model, data, rounds=1)
    assert toy.distance(half, plain) < 1e-12


def test_full_last_round_trains_everyone_and_leaves_the_server() -> None:
    data, model, method = toy.toy(), toy.model(), toy.method("fedper")
    with_it, history = toy.looped(method, model, data, full_last_round=True)
    without, _ = toy.looped(method, model, data)
    assert history[-1].number == 4
    assert history[-1].scores["post", "test"].clients.tolist() == [0, 1, 2, 3, 4]
    server = {n: t for n, t in with_it.items() if n.startswith("server.")}
    toy.assert_same(server, {n: t for n, t in without.items() if n.startswith("server.")})


def test_all_clients_take_part_in_an_aggregated_last_round() -> None:
    """FedAvg: the last state is the mean of what five clients make of the state after one sampled round."""
    data, model, method = toy.toy(), toy.model(), toy.method("fedavg")
    made, history = toy.looped(method, model, data, rounds=2, join_ratio=0.6, aggregate_last_round=True)
    assert [len(record.participants) for record in history] == [3, 5, 5]  # the third is FedAvg's final step
    sampled, _ = toy.looped(method, model, data, rounds=2, join_ratio=0.6)
    assert toy.distance(made, sampled) > 1e-6
    everyone, whole = toy.looped(method, model, data, rounds=1, join_ratio=0.6, aggregate_last_round=True)
    plain, _ = toy.looped(method, model, data, rounds=1, join_ratio=1.0)
    assert len(whole[0].participants) == 5
    assert toy.distance(everyone, plain) == 0


def test_everybody_diverging_ends_the_run_with_advice() -> None:
    with pytest.raises(CoterieError, match="smaller learning rate"):
        toy.looped(toy.method("fedavg", lr=1e200), toy.model(), toy.toy())


def test_the_client_that_fails_is_named() -> None:
    class Fails(type(toy.method("fedavg"))):  # type: ignore[misc]
        def client_train(self, model, state, down, data):  # type: ignore[no-untyped-def]
            if len(data.y) == 31:  # client 3
                raise ValueError("boom")
            return super().client_train(model, state, down, data)

    for processes in (1, 2):
        with pytest.raises(CoterieError, match=r"client 3 in train, round 0: ValueError: boom") as caught:
            toy.looped(Fails(), toy.model(), toy.toy(), processes, join_ratio=1.0)
        assert 'raise ValueError("boom")' in "".join(caught.value.__notes__)  # the user's own line


def test_a_personal_model_is_a_module() -> None:
    data = toy.toy()
    result = coterie.run(toy.method("fedper"), data, toy.network(), rounds=2, backend="looped")
    x, y = data.test.client(1)
    right = (result.personal_model(1)(x).argmax(1) == y).sum()
    assert int(right) == int(result.history[-1].scores["pre", "test"].weighted[1])
    with pytest.raises(CoterieError, match="clients are 0 to 4"):
        result.personal_model(5)


def test_settings_of_a_made_method_are_refused() -> None:
    with pytest.raises(CoterieError, match="lr is set twice"):
        coterie.run(toy.method("fedper"), toy.toy(), toy.network(), lr=0.1)
    with pytest.raises(CoterieError, match="did you mean 'momentum'"):
        coterie.run("fedper", toy.toy(), toy.network(), momentun=0.1)


def test_finite_rows() -> None:
    nan, inf = float("nan"), float("inf")
    trees = {"a": torch.tensor([[1.0, 2.0], [nan, 1.0], [1.0, 1.0]]), "b": torch.tensor([1.0, 1.0, inf])}
    assert tree.finite(trees, 3).tolist() == [True, False, False]
