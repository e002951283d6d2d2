"""Verdicts by equivalence, next to scipy's intervals and a plain enumeration of shuffled columns."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from scipy import stats
from tools.ledger.pages import noise_text

from coterie.papers.recipes import Published
from coterie.papers.verdicts import (
    RunNoise,
    independent,
    interval,
    judged,
    measured_noise,
    read_noise,
    verdict,
)

NOISE = RunNoise(0.4, 12, 6)


def test_from_five_runs_on_the_interval_is_students() -> None:
    scores = [80.1, 80.9, 79.6, 81.2, 80.4]
    low, high = stats.t.interval(0.95, 4, np.mean(scores), stats.sem(scores))
    for noise in (NOISE, None):
        found = interval(scores, noise)
        assert found.half is not None
        assert (found.mean - found.half, found.mean + found.half) == pytest.approx((low, high))


@pytest.mark.parametrize("scores", [[80.0], [80.0, 80.1], [79.0, 81.0, 80.5, 82.0]])
def test_fewer_runs_have_the_pooled_noise_or_their_own_if_it_is_larger(scores: list[float]) -> None:
    std = max(NOISE.std, statistics.stdev(scores)) if len(scores) > 1 else NOISE.std
    assert interval(scores, NOISE).half == pytest.approx(stats.t.ppf(0.975, 12) * std / math.sqrt(len(scores)))


def test_one_run_without_noise_has_no_interval() -> None:
    found = judged(Published(80.0), [80.0], None)
    assert (found.verdict, found.difference, found.band) == ("undecided", 0.0, None)


def test_the_band_is_the_repeatability_limit_and_at_most_one_and_a_half() -> None:
    draw = np.random.default_rng(0)
    two = draw.normal(0, NOISE.std, (200_000, 2))
    assert NOISE.band == pytest.approx(np.quantile(np.abs(two[:, 0] - two[:, 1]), 0.95), rel=0.01)
    assert RunNoise(2.0, 5, 5).band == 1.5


@pytest.mark.parametrize(
    ("difference", "half", "said"),
    [
        (0.5, 0.4, "met"),
        (-0.5, 0.5, "met"),
        (0.5, 0.6, "undecided"),
        (1.2, 0.1, "off"),
        (-1.2, 0.3, "undecided"),
        (0.0, None, "undecided"),
    ],
)
def test_verdicts_are_about_the_whole_interval(difference: float, half: float | None, said: str) -> None:
    assert verdict(difference, half, 1.0) == said


def test_equivalence_agrees_with_two_one_sided_tests() -> None:
    """met is Schuirmann's procedure at 2.5 % on each side."""
    draw = np.random.default_rng(1)
    for _ in range(200):
        scores = draw.normal(80.4, 0.7, 6)
        found = judged(Published(80.0), scores.tolist(), NOISE)
        p = max(
            stats.ttest_1samp(scores, 80.0 - NOISE.band, alternative="greater").pvalue,
            stats.ttest_1samp(scores, 80.0 + NOISE.band, alternative="less").pvalue,
        )
        assert (found.verdict == "met") == (p <= 0.025)


def test_runs_on_one_draw_of_a_random_partition_count_once() -> None:
    scores = [(80.0, "a"), (82.0, "a"), (70.0, "b")]
    assert independent(scores, drawn=True) == [81.0, 70.0]
    assert independent(scores, drawn=False) == [80.0, 82.0, 70.0]


def test_the_noise_that_comes_with_coterie_is_read_back() -> None:
    import yaml

    noises = {
        ("a", "seeds"): RunNoise(0.5, 3, 2, ("P1-T9", "P1-T10")),
        ("a", "draws"): RunNoise(1.25, 1, 1),
        ("b", "draws"): RunNoise(2.0, 4, 4),
    }
    assert read_noise(yaml.safe_load(noise_text(noises))) == noises
    assert measured_noise()["cifar10", "seeds"].freedom > 0
