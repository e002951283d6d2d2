"""Searches whose candidates depend on the scores so far: same seed, same candidates, however often they are cut."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import coterie
from coterie.core.errors import CoterieError
from coterie.tuning.adaptive import Adaptive
from coterie.tuning.space import Space, Span
from coterie.tuning.standings import ranked, untried
from coterie.tuning.strategy import Job, SearchBudget, Trial
from tests import toy

SPACE: Space = {"lr": Span(1e-4, 1.0, whole=False), "local_epochs": Span(1, 8, whole=True), "combine": [True, False]}
HERE = coterie.Execution(backend="looped", processes=1)


def adaptive(count: int = 30, seed: int = 0, eta: int | None = None, **budget: Any) -> Adaptive:
    return Adaptive(SPACE, count, 9, [0], SearchBudget(**budget), seed=seed, eta=eta)


def trainer(search: Adaptive, seconds: float = 0.0) -> tuple[Callable[[Job], Trial], list[Job]]:
    """Best at lr = 0.03 with 5 epochs and combine; the score grows with the rounds."""
    asked: list[Job] = []

    def train(job: Job) -> Trial:
        asked.append(job)
        settings = search.candidates[job.candidate]
        off = abs(settings["lr"] - 0.03) + 0.05 * abs(settings["local_epochs"] - 5) + 0.2 * (not settings["combine"])
        return Trial(job, job.rounds / 9 / (1 + off), job.rounds, seconds)

    return train, asked


def test_the_same_seed_proposes_the_same_candidates() -> None:
    found = []
    for seed in (3, 3, 4):
        search = adaptive(seed=seed)
        search.run(trainer(search)[0])
        found.append(search.candidates)
    assert found[0] == found[1] != found[2]
    assert len(found[0]) == 30
    assert all(1e-4 <= c["lr"] <= 1 and 1 <= c["local_epochs"] <= 8 for c in found[0])
    assert all(isinstance(c["local_epochs"], int) and isinstance(c["combine"], bool) for c in found[0])


def test_tpe_learns_from_the_scores() -> None:
    """The later half of the proposals is better than the earlier one, for each of several seeds."""
    for seed in range(3):
        search = adaptive(40, seed)
        search.run(trainer(search)[0])
        scores = [search.merit(number, 9) for number in range(40)]
        assert sum(scores[20:]) > sum(scores[:20])
        assert max(scores) > 0.9


@pytest.mark.parametrize("eta", [None, 3])
def test_a_search_that_was_cut_proposes_what_an_uncut_one_does(eta: int | None) -> None:
    whole = adaptive(12, eta=eta)
    train, asked = trainer(whole)
    whole.run(train)
    for cut in range(len(asked) + 1):
        again = adaptive(12, eta=eta)
        again.know([whole.trials[job] for job in asked[:cut]], dict(enumerate(whole.candidates[: asked[cut - 1][0]])))
        train, more = trainer(again)
        again.run(train)
        assert asked[:cut] + more == asked
        assert (again.candidates, again.trials) == (whole.candidates, whole.trials)


def test_asha_stops_candidates_that_are_not_among_the_best_third() -> None:
    """By hand: stages of 1, 3 and 9 rounds. A candidate continues if its rank is within a third of those that were
    measured at its stage so far, itself included; of fewer than three, the best one continues."""
    search = adaptive(9, eta=3)
    train, asked = trainer(search)
    search.run(train)
    jobs = iter(asked)
    seen: dict[int, list[float]] = {1: [], 3: []}
    for number in range(9):
        for rounds in (1, 3, 9):
            assert next(jobs) == Job(number, 0, rounds)
            if rounds == 9:
                break
            score = search.merit(number, rounds)
            seen[rounds].append(score)
            if sorted(seen[rounds], reverse=True).index(score) >= max(len(seen[rounds]) // 3, 1):
                break
    assert next(jobs, None) is None
    assert {job.rounds for job in asked} == {1, 3, 9}
    assert len([job for job in asked if job.rounds == 9]) < 9
    assert ranked(search)[0].rounds == 9


def test_a_small_space_is_searched_once() -> None:
    search = Adaptive({"combine": [True, False], "lr": [0.1, 0.01]}, 16, 9, [0], SearchBudget(), seed=0)
    asked: list[Job] = []

    def train(job: Job) -> Trial:
        asked.append(job)
        return Trial(job, 0.5, 9, 0.0)

    search.run(train)
    assert [job.candidate for job in asked] == [0, 1, 2, 3]
    assert len({json.dumps(c) for c in search.candidates}) == 4


def test_what_diverges_is_a_score_of_zero_and_the_budget_ends_it() -> None:
    search = adaptive(10, rounds=31)
    search.run(lambda job: Trial(job, None, 4, 0.0, "diverged") if job.candidate == 1 else Trial(job, 0.5, 9, 0.0))
    assert [job.candidate for job in search.trials] == [0, 1, 2, 3]  # 9 + 4 + 9 + 9 rounds
    assert search.failed(1) == "diverged"
    assert untried(search)[1] == "then 5 more settings"
    assert len(untried(search)) == 2


def test_other_proposals_than_recorded_are_refused() -> None:
    search = adaptive(4)
    search.know([], {0: {"lr": 0.5, "local_epochs": 1, "combine": True}})
    with pytest.raises(CoterieError, match="started with other libraries: candidate 0 was"):
        search.run(trainer(search)[0])


def test_without_optuna_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(CoterieError) as error:
        coterie.tune("fedavg", {"lr": "0.01..0.1"}, toy.toy(), toy.network(), search="tpe", out=tmp_path / "t")
    assert str(error.value) == "--search tpe and asha need Optuna: pip install 'coterie[tune]'"
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("search", ["tpe", "asha"])
def test_on_clients_it_resumes_exactly_and_says_nothing(
    search: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A budget cuts it; without one it continues. The same as uncut, and Optuna logs nothing."""
    how: dict[str, Any] = {"local_epochs": 1, "batch_size": 10, "rounds": 4, "backend": HERE, "final": False}
    how |= {"search": search, "trials": 6, "eta": 2, "data": toy.toy(augmented=False), "model": toy.network()}
    over = {"lr": "0.001..0.5", "momentum": [0.0, 0.9]}
    coterie.tune("fedavg", over, out=tmp_path / "cut", budget_rounds=9, **how)
    resumed = coterie.tune("fedavg", over, out=tmp_path / "cut", **how)
    whole = coterie.tune("fedavg", over, out=tmp_path / "whole", **how)
    assert [(s.settings, s.scores, s.rounds) for s in resumed.standings] == [
        (s.settings, s.scores, s.rounds) for s in whole.standings
    ]
    assert len(whole.standings) == 6
    assert not list((tmp_path / "cut" / "checkpoints").iterdir())
    assert capfd.readouterr() == ("", "")
