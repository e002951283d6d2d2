"""Who goes on, and what is paid for, against tables worked out by hand; nothing is trained."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from coterie.api.variations import Candidate
from coterie.core.errors import CoterieError
from coterie.tuning.standings import ranked, untried
from coterie.tuning.strategy import BudgetSpent, Job, SearchBudget, Stage, Stages, Trial, halving

SCORES = {  # candidate -> accuracy in percent after 1, 3 and 9 rounds
    0: (50, 60, 61),
    1: (70, 71, 72),
    2: (20, 99, 99),  # would have been the best, and is dropped before that is known
    3: (60, 80, 81),
    4: (10, 10, 10),
    5: (65, 79, 95),
    6: (30, 30, 30),
    7: (40, 40, 40),
    8: (0, 0, 0),
}


def strategy_of(
    stages: list[Stage], seeds: list[int], budget: SearchBudget, tried: list[Candidate] | None = None
) -> Stages:
    return Stages(tried or [{"lr": c} for c in range(stages[0].candidates)], stages, seeds, budget)


def fake(seconds: float = 0.0) -> tuple[Callable[[Job], Trial], list[Job]]:
    """A trainer that looks the accuracy up, and what it was asked to do."""
    asked: list[Job] = []

    def train(job: Job) -> Trial:
        asked.append(job)
        return Trial(job, SCORES[job.candidate][{1: 0, 3: 1, 9: 2}[job.rounds]] / 100, job.rounds, seconds)

    return train, asked


@pytest.mark.parametrize(
    ("candidates", "rounds", "eta", "expected"),
    [
        (9, 9, 3, [(9, 1), (3, 3), (1, 9)]),
        (9, 27, 3, [(9, 3), (3, 9), (1, 27)]),
        (10, 10, 3, [(10, 1), (3, 3), (1, 10)]),
        (27, 3, 3, [(27, 1), (9, 3)]),  # one round is the least, so nine have all rounds
        (5, 20, 2, [(5, 5), (2, 10), (1, 20)]),
        (2, 100, 3, [(2, 100)]),
    ],
)
def test_stages(candidates: int, rounds: int, eta: int, expected: list[tuple[int, int]]) -> None:
    assert halving(candidates, rounds, eta) == expected


def test_eta_of_one_would_never_end() -> None:
    with pytest.raises(CoterieError, match="eta must be at least 2, got 1"):
        halving(4, 4, 1)


def test_halving_in_order() -> None:
    """By hand: after 1 round 1, 5, 3 lead; after 3 rounds 3 leads; 2 and 5 would have been better in the end."""
    strategy, (train, asked) = strategy_of(halving(9, 9, 3), [0], SearchBudget()), fake()
    dropped: list[int] = []
    strategy.run(train, dropped.append)
    assert asked == [*(Job(c, 0, 1) for c in range(9)), Job(1, 0, 3), Job(5, 0, 3), Job(3, 0, 3), Job(3, 0, 9)]
    assert dropped == [0, 2, 4, 6, 7, 8, 1, 5, 3]
    order = [s.number for s in ranked(strategy)]
    assert order == [3, 5, 1, 0, 7, 6, 2, 4, 8]
    assert (strategy.untried, strategy.later) == ([], [])


def test_the_earlier_one_wins_a_tie() -> None:
    strategy = strategy_of(halving(4, 4, 2), [0], SearchBudget())
    asked: list[Job] = []

    def same(job: Job) -> Trial:
        asked.append(job)
        return Trial(job, 0.5, job.rounds, 0.0)

    strategy.run(same)
    assert [job.candidate for job in asked] == [0, 1, 2, 3, 0, 1, 0]


def test_what_is_known_is_not_asked_again() -> None:
    """However the search was cut, the rest is what an uncut one would have done."""
    whole, (train, asked) = strategy_of(halving(9, 9, 3), [0], SearchBudget()), fake()
    whole.run(train)
    for cut in range(len(asked) + 1):
        again, (train, more) = strategy_of(halving(9, 9, 3), [0], SearchBudget()), fake()
        again.know(whole.trials[job] for job in asked[:cut])
        again.run(train)
        assert asked[:cut] + more == asked
        assert again.trials == whole.trials


def test_the_mean_over_seeds_decides() -> None:
    table = {(0, 0): 0.9, (0, 1): 0.1, (1, 0): 0.6, (1, 1): 0.6}
    strategy = strategy_of([Stage(2, 5)], [0, 1], SearchBudget())
    strategy.run(lambda job: Trial(job, table[job.candidate, job.seed], 5, 1.5))
    first, second = ranked(strategy)
    assert (first.number, first.scores, first.seconds) == (1, {0: 0.6, 1: 0.6}, 3.0)
    assert second.spread is not None
    assert second.spread.mean == pytest.approx(0.5)
    assert second.spread.std == pytest.approx(0.32**0.5)  # of 0.9 and 0.1: 2 * 0.4², by 2 - 1


def test_what_fails_never_goes_on() -> None:
    strategy = strategy_of(halving(4, 4, 2), [0, 1], SearchBudget())
    asked: list[Job] = []

    def train(job: Job) -> Trial:
        asked.append(job)
        if job.candidate in (0, 1, 3):
            return Trial(job, None, 0, 0.0, "diverged")
        return Trial(job, 0.1, job.rounds, 0.0)

    strategy.run(train)
    jobs = [(0, 0, 1), (1, 0, 1), (2, 0, 1), (2, 1, 1), (3, 0, 1), (2, 0, 2), (2, 1, 2), (2, 0, 4), (2, 1, 4)]
    assert asked == jobs  # no second seed for those, and only one that goes on
    standings = ranked(strategy)
    assert [s.number for s in standings] == [2, 0, 1, 3]
    assert [s.failed for s in standings] == [None, "diverged", "diverged", "diverged"]


@pytest.mark.parametrize(("rounds", "done"), [(9, 0), (10, 1), (39, 3), (40, 4), (79, 7), (80, 8), (None, 8)])
def test_rounds_of_a_grid(rounds: int | None, done: int) -> None:
    """4 settings, 2 seeds, 10 rounds each: 80."""
    strategy = strategy_of([Stage(4, 10)], [0, 1], SearchBudget(rounds=rounds))
    strategy.run(lambda job: Trial(job, 0.5, 10, 0.0))
    every = [Job(c, seed, 10) for c in range(4) for seed in (0, 1)]
    assert list(strategy.trials) == every[:done]
    assert strategy.untried == every[done:]


@pytest.mark.parametrize(("rounds", "done"), [(8, 8), (9, 9), (10, 9), (11, 10), (15, 12), (20, 12), (21, 13)])
def test_rounds_of_halving(rounds: int, done: int) -> None:
    """9 trials of 1 round; 3 that go on from 1 to 3: 6 more; one from 3 to 9: 6 more. Together 21, not 27."""
    strategy, (train, _) = strategy_of(halving(9, 9, 3), [0], SearchBudget(rounds=rounds)), fake()
    strategy.run(train)
    assert len(strategy.trials) == done
    assert bool(strategy.untried) == (done < 13)


def test_what_was_not_tried_is_said() -> None:
    settings = [{"lr": float(c), "keep_momentum": True} for c in range(9)]
    strategy, (train, _) = strategy_of(halving(9, 9, 3), [0], SearchBudget(rounds=11), settings), fake()
    strategy.run(train)
    assert untried(strategy) == [
        "lr=5.0 keep_momentum=true (3 rounds)",
        "lr=3.0 keep_momentum=true (3 rounds)",
        "then the best 1 with 9 rounds",
    ]
    assert [s.number for s in ranked(strategy)][:3] == [1, 5, 3]  # the only one with 3 rounds, then by accuracy


def test_rounds_of_a_failure_are_those_that_it_reached() -> None:
    """3 of 10 rounds, so 17 are left for one more."""
    strategy = strategy_of([Stage(3, 10)], [0], SearchBudget(rounds=20))
    strategy.run(lambda job: Trial(job, 0.5, 10, 0.0) if job.candidate else Trial(job, None, 3, 0.0, "diverged"))
    assert [job.candidate for job in strategy.trials] == [0, 1]


def test_time() -> None:
    """40 s each, of 100: they begin at 0, 40 and 80."""
    strategy, (train, asked) = strategy_of([Stage(9, 1)], [0], SearchBudget(seconds=100)), fake(seconds=40.0)
    strategy.run(train)
    assert [job.candidate for job in asked] == [0, 1, 2]
    assert len(strategy.untried) == 6


def test_a_trial_may_end_the_search_itself() -> None:
    def spent(job: Job) -> Trial:
        raise BudgetSpent

    strategy = strategy_of([Stage(2, 1)], [0], SearchBudget())
    strategy.run(spent)
    assert strategy.untried == [(0, 0, 1), (1, 0, 1)]
