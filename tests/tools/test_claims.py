"""Ranks, margins, coverage and campaigns of the ledger, next to scipy and counts by hand."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from tools.ledger import Files
from tools.ledger.claims import behind, claims, summary
from tools.ledger.coverage import Tally, chance, copied, coverage, every, held_out, near, once
from tools.ledger.findings import Findings
from tools.ledger.noise import Repeated, effective, over_draws, pooled, shared
from tools.ledger.rankings import Agreement, agreement, kendall, margin
from tools.ledger.sections import cells

from coterie.analysis.significance import Spread
from coterie.core.errors import CoterieError
from coterie.papers.recipes import find, recipes
from coterie.papers.verdicts import RunNoise, interval, verdict
from tests.tools.test_ledger import CIFAR, FASHION, RESULTS, put


@cache
def stored() -> Files:
    """The results that come with the repository."""
    return Files(RESULTS)


def test_kendalls_tau_is_scipys() -> None:
    draw = np.random.default_rng(0)
    for n in (3, 8, 23):
        for _ in range(20):
            a, b = draw.integers(0, 6, n), draw.normal(size=n).round(1)  # with ties
            if len(set(a.tolist())) > 1:
                assert kendall(a.tolist(), b.tolist()) == pytest.approx(stats.kendalltau(a, b).statistic)


def ordered(published: Sequence[float], ours: Sequence[float], std: float, freedom: int = 1000) -> Agreement:
    """Of single runs with this noise."""
    noise = RunNoise(std, freedom, 9)
    return agreement(list(published), [interval([own], noise) for own in ours], noise)


def test_the_expected_range_of_tau_grows_with_the_noise() -> None:
    published = [70.0, 72.0, 74.0, 76.0]
    sure = ordered(published, published, 1e-6)
    assert (sure.tau, sure.low, sure.high) == (1.0, 1.0, 1.0)
    noisy = ordered(published, published, 1.5)
    assert noisy.low is not None
    assert noisy.low < 0.7
    unknown = agreement(published, [Spread(p, None, None) for p in published], None)
    assert (unknown.low, unknown.expected) == (None, None)


@pytest.mark.long
@pytest.mark.parametrize("freedom", [2, 7])
def test_the_range_of_tau_covers_95_percent_of_reproductions_that_are_right(freedom: int) -> None:
    """The published numbers are the true means of 23 methods, as far from each other as in FedPAC's Table 1; the noise
    is measured with few degrees of freedom."""
    draw, std = np.random.default_rng(1), 0.83
    found = []
    for _ in range(300):
        published = draw.normal(73, 4.5, 23).round(2)
        measured = std * (draw.chisquare(freedom) / freedom) ** 0.5
        made = ordered(published.tolist(), (published + draw.normal(0, std, 23)).tolist(), measured, freedom)
        assert made.low is not None
        assert made.high is not None
        found.append((made.low <= made.tau <= made.high, made.expected))
    assert np.mean([inside for inside, _ in found]) == pytest.approx(0.95, abs=0.04)
    assert np.mean([expected for _, expected in found]) == pytest.approx(0.975, abs=0.03)


def test_an_order_that_noise_does_not_explain_is_not_expected() -> None:
    published = [70.0, 72.0, 74.0, 76.0]
    assert ordered(published, published[::-1], 0.3).expected is False
    assert ordered(published, published, 0.3).expected is True


def test_a_margin_is_paired_over_seeds() -> None:
    hero = {0: 81.0, 1: 82.5, 2: 80.1, 3: 81.9, 4: 83.0, 7: 99.0}
    rival = {0: 80.2, 1: 81.0, 2: 79.9, 3: 80.7, 4: 82.6, 8: 10.0}
    ours, other = np.array([[hero[s], rival[s]] for s in range(5)]).T
    low, high = stats.ttest_rel(ours, other).confidence_interval(0.95)
    found = margin(hero, rival, RunNoise(9.0, 3, 3))
    assert (found.value, found.low, found.high) == pytest.approx((float(np.mean(ours - other)), low, high))
    one = margin({0: 81.0}, {0: 80.0}, RunNoise(0.5, 20, 9))
    half = stats.t.ppf(0.975, 20) * 0.5 * np.sqrt(2)
    assert (one.value, one.low, one.high) == pytest.approx((1.0, 1.0 - half, 1.0 + half))
    assert margin({0: 81.0}, {0: 80.0}, None).low is None


def repeated(scores: Sequence[float], block: str = "one", first: int = 0) -> Repeated:
    return Repeated(block, dict(enumerate(map(float, scores), first)))


def test_noise_is_pooled_over_cells_without_those_that_are_unstable() -> None:
    stable = [(70.0, 70.6, 70.1), (80.0, 80.4), (60.0, 60.9, 60.3)]
    found = pooled([repeated(scores, str(i)) for i, scores in enumerate([*stable, (50.0, 58.0)])])
    total = sum(statistics.variance(cell) * (len(cell) - 1) for cell in stable)
    assert (found.std, found.cells) == (pytest.approx((total / 5) ** 0.5), 3)


def test_cells_that_share_their_seeds_have_fewer_degrees_of_freedom() -> None:
    scores = np.random.default_rng(0).normal(size=(6, 5))
    same = [repeated(scores[0] + shift) for shift in (0, 10, 20)]
    assert effective(same) == pytest.approx(4)  # three copies of one cell tell no more than one
    covariance = np.cov(scores)
    by_hand = 4 * np.trace(covariance) ** 2 / np.trace(covariance @ covariance)
    assert effective([repeated(own) for own in scores]) == pytest.approx(by_hand)
    apart = [repeated(own, str(i)) for i, own in enumerate(scores)]
    assert effective(apart) == pytest.approx(4 * np.trace(covariance) ** 2 / (np.diag(covariance) ** 2).sum())
    assert shared(repeated([1, 2, 3]), repeated([1, 2, 5], first=7)) == 0.0  # no seed in common


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
def test_degrees_of_freedom_are_not_more_than_those_of_the_pooled_variance(correlation: float) -> None:
    """Of a simulation: twice the squared mean of the pooled variance, divided by its variance."""
    draw = np.random.default_rng(2)
    scores = correlation**0.5 * draw.normal(size=(20_000, 1, 5)) + (1 - correlation) ** 0.5 * draw.normal(
        size=(20_000, 8, 5)
    )
    variances = scores.var(-1, ddof=1).mean(-1)
    found = [effective([repeated(own) for own in run]) for run in scores[:200]]
    assert np.median(found) < 1.05 * 2 * variances.mean() ** 2 / variances.var()
    assert np.median(found) > 3.9  # at least those of one cell


def test_draws_count_by_partitions_whatever_the_number_of_methods() -> None:
    pairs = {"drawn": [(50.0, 55.0), (57.0, 62.0), (76.0, 78.0)], "classes": [(66.0, 70.0)]}
    found = over_draws([repeated(own, block) for block, cells in pairs.items() for own in cells])
    variances = [statistics.fmean(map(statistics.variance, cells)) for cells in pairs.values()]
    assert (found.freedom, found.cells) == (2, 4)
    assert found.std == pytest.approx(statistics.fmean(variances) ** 0.5)


def test_draws_that_were_searched_for_are_no_noise() -> None:
    noises = stored().noises
    assert noises["cifar10", "draws"].freedom == 2
    assert set(noises["cifar10", "draws"].measured_in) == {"P1-T7-clustered", "P3-T1-CIFAR10-0.1"}
    for (_, kind), noise in noises.items():
        assert kind == "draws" or noise.freedom < noise.cells  # one partition and three to five seeds


def test_the_printed_numbers_are_those_that_were_counted_in_the_papers() -> None:
    """872 numbers in 21 tables; 48 rows of the replication and FedPAC's row of Table 4 (8) are verbatim copies."""
    files = stored()
    assert len(every(files)) == 816
    assert sum(copied(files, recipe) for recipe in recipes()) == 12 * 4 + 8
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in coverage(files, {}).splitlines()[2:]]
    assert lines[-1][2:6] == ["872", "56", "816", "743"]
    assert [sum(int(line[i]) for line in lines[:-1]) for i in range(2, 11)] == [int(n) for n in lines[-1][2:11]]
    assert lines[0][:6] == ["Replication of FedPAC, 2025", "Table 1", "68", "48", "20", "8"]  # 2 rows of 17 are its own


def test_a_number_of_several_tables_counts_once(tmp_path: Path) -> None:
    """FedPAC's number is in Tables 1, 2 and 5 and in the replication, FedAvg's in 1 and 2 of these."""
    put(tmp_path, CIFAR, "FedPAC", [81.1, 81.2, 81.0, 81.2, 81.1])
    put(tmp_path, CIFAR, "FedAvg", [60.0])
    files = Files(tmp_path)
    own = [c for c in every(files) if c.comparison.ours and c.row.name in ("FedPAC", "Both", "FedAvg")]
    assert len(own) == 4 + 2
    assert sorted((c.recipe.id, c.row.name) for c in once(own)) == [(CIFAR, "FedAvg"), (CIFAR, "FedPAC")]
    assert Tally.of(own) == (1, 1, 0, 0)
    assert near(own) == 1


def test_chance_is_the_mean_over_all_shuffles(tmp_path: Path) -> None:
    """Of the numbers asked about, each counted once, in the column of the table that prints it first."""
    put(tmp_path, CIFAR, "FedPAC", [81.1, 81.2, 81.0, 81.2, 81.1])
    put(tmp_path, CIFAR, "FedAvg", [70.0, 70.1, 69.9, 70.0, 70.1])
    put(tmp_path, CIFAR, "Ditto", [76.9, 77.1, 77.0, 77.0, 76.9])
    files = Files(tmp_path)
    column = [c for c in cells(files, find(CIFAR)) if c.comparison.ours]
    printed = [c.comparison.published.mean for c in column if c.comparison.published]
    assert len(column) == len(printed) == 4  # FedAvg-FT too
    counts = [
        [
            verdict(c.comparison.ours.mean - p, c.comparison.ours.half, c.comparison.band) == "met"
            for c, p in pairs
            if c.comparison.ours
        ]
        for order in itertools.permutations(printed)
        for pairs in [list(zip(column, order, strict=True))]
    ]
    assert np.sum(counts) > 0
    assert chance(files, [*column, *column]) == pytest.approx(np.sum(counts) / len(counts))
    assert chance(files, column[:1]) == pytest.approx(np.mean(counts, axis=0)[0])


def test_cells_that_a_reading_was_chosen_on_are_not_held_out() -> None:
    files = stored()
    names = {(cell.recipe.id, cell.row.name) for cell in held_out(files)}
    assert (CIFAR, "FedAvg") in names
    assert (FASHION, "FedPAC") in names
    assert (CIFAR, "FedBABU") not in names
    assert ("P1-T5-CIFAR10", "FedPAC") not in names  # the same number and training as in Table 1
    assert Tally.of(held_out(files)).all == len(once(held_out(files))) < 743


def test_the_headline_of_a_table_by_hand(tmp_path: Path) -> None:
    for row, scores in {"Local-only": [60.0], "FedEM-FT (M=5)": [79.0, 80.0], "FedPAC": [81.0, 83.0]}.items():
        put(tmp_path, CIFAR, row, scores)
    (claim,) = (c for c in claims(Files(tmp_path)) if c.recipe.id == CIFAR)
    assert (claim.rival, claim.seeds, claim.methods) == ("FedEM (M=5)", 2, 4)  # the same training as FedEM-FT
    assert claim.published == pytest.approx(81.13 - 80.17)
    assert claim.ours.value == pytest.approx(2.5)
    findings = {
        "findings": {"X": f"{{{CIFAR}.fedpac.lead:.1f}} {{{CIFAR}.fedpac.lag:.1f}} {{{CIFAR}.fedpac.lead-in-print}}"}
    }
    (tmp_path / "findings.yaml").write_text(json.dumps(findings), encoding="utf-8")
    assert Findings(Files(tmp_path)).texts["X"] == "2.5 -2.5 0.96"
    assert claim.agreement.tau == pytest.approx(
        stats.kendalltau([65.43, 73.41, 80.17, 81.13], [60.0, 79.5, 79.5, 82.0]).statistic
    )


def test_a_lead_has_no_interval_where_nothing_was_repeated(tmp_path: Path) -> None:
    put(tmp_path, CIFAR, "FedAvg", [68.0, 69.0, 68.5])  # the noise of another setting of the dataset
    for row, score in {"Local-only": 60.0, "FedAvg-FT": 70.0, "FedPAC": 83.0}.items():
        put(tmp_path, "P1-T1-CIFAR10-100", row, [score])
        put(tmp_path, CIFAR, row, [score])
    found = {claim.recipe.id: claim for claim in claims(Files(tmp_path))}
    assert found[CIFAR].ours.low is not None
    assert found[CIFAR].published == pytest.approx(81.13 - 80.17)  # the best in print, FedEM-FT, was not run
    assert found["P1-T1-CIFAR10-100"].ours.low is None
    assert found["P1-T1-CIFAR10-100"].verdict == "ahead, no interval"
    for row in ("Local-only", "FedAvg-FT", "FedPAC"):
        put(tmp_path, "P1-T1-CIFAR10-100", row, [70.0, 70.5] if row != "FedPAC" else [60.0, 60.5])
    found = {claim.recipe.id: claim for claim in claims(Files(tmp_path))}
    assert found["P1-T1-CIFAR10-100"].verdict == "fails"


def test_a_lead_in_several_tables_counts_where_its_rivals_are_strongest(tmp_path: Path) -> None:
    """FedPAC's training is in Tables 1 and 5, but only the first has FedEM."""
    for row, score in {"Local-only": 65.0, "FedAvg-FT": 76.0, "FedEM-FT (M=5)": 80.0, "FedPAC": 81.0}.items():
        put(tmp_path, CIFAR, row, [score, score + 0.1])
    files = Files(tmp_path)
    found = {claim.recipe.id: claim for claim in claims(files)}
    assert found[CIFAR].stronger == ""
    assert found["P1-T5-CIFAR10"].rival == "FedAvg-FT"
    assert found["P1-T5-CIFAR10"].shown == f"holds; a better rival in {CIFAR}"
    (line,) = (line for line in summary(files).splitlines() if line.startswith("| FedPAC"))
    assert [cell.strip() for cell in line.split("|")[2:5]] == ["23 of 24", "1", "1"]


def test_claims_say_what_a_method_is_compared_with() -> None:
    found = {claim.hero: claim.compared for claim in claims(stored())}
    assert found["Modify"] == "Replicate"
    assert found["FedPAC"] == found["FedCRC-Per"] == "all others"
    assert found["FedCRC"] == "FedAvg, FedProx, FedBABU"  # the paper claims it of both of its models


def test_columns_in_which_a_paper_is_not_ahead_in_print_are_listed(tmp_path: Path) -> None:
    """Also of tables that were not run."""
    listed = behind(Files(tmp_path))
    assert "P1-T1-CINIC10-100 (FedPAC 77.36, FedEM-FT (M=5) 78.35)" in listed
    assert "P2-T2-CIFAR100 P (FedReG 50.26, GPFL 56.91)" in listed
    assert "P2-T6 P (FedReG 98.25, FedPer 98.29)" in listed
    assert "P3-T1-CIFAR10-0.5 (FedCRC 70.75, FedBABU 71.27)" in listed
    assert "P1-T1-CINIC10-20" not in listed


def test_a_paper_of_which_nothing_was_run_is_not_tested(tmp_path: Path) -> None:
    put(tmp_path, CIFAR, "FedPAC", [81.0])
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in summary(Files(tmp_path)).splitlines()]
    assert len({len(line) for line in lines}) == 1
    assert {line[0]: line[-1] for line in lines}["PFAKD"] == "not tested: no column was run"


def test_a_campaign_is_not_mixed_with_an_earlier_one(tmp_path: Path) -> None:
    put(tmp_path, CIFAR, "FedPAC", [80.0, 81.0, 82.0])
    put(tmp_path, CIFAR, "FedAvg", [70.0])
    put(tmp_path / "campaigns" / "2", CIFAR, "FedPAC", [77.0], recipe_commit="abc", recipe_hash="1")
    files = Files(tmp_path)
    shown = {cell.row.name: cell.scores() for cell in cells(files, find(CIFAR)) if cell.readings}
    assert shown["FedPAC"] == [pytest.approx(77.0)]
    assert shown["FedAvg"] == [pytest.approx(70.0)]
    assert len(files.in_no_table()) == 3
    put(tmp_path / "campaigns" / "2", CIFAR, "Ditto", [77.0], recipe_commit="def", recipe_hash="2")
    with pytest.raises(CoterieError, match="start another campaign"):
        Files(tmp_path)
    for path in (tmp_path / "campaigns" / "2" / CIFAR).glob("ditto*"):
        path.unlink()
    put(tmp_path / "campaigns" / "2", CIFAR, "Ditto", [77.0], recipe_commit="abc+", recipe_hash="1")
    with pytest.raises(CoterieError, match="was not committed"):
        Files(tmp_path)


def test_results_of_a_fixed_draw_count_where_partitions_vary(tmp_path: Path) -> None:
    """The partition of seed 0 is the same whether it was asked for as 0 or as one of many."""
    recipe = find("P3-T1-CIFAR10-1")
    assert recipe.partition["seed"] == "vary"
    (row,) = (row for row in recipe.rows if row.name == "FedCRC")
    settings = recipe.plan(row, ()).settings
    fixed = {k: v for k, v in settings["partition"].items() if k != "seed"}
    curve = {"round": [1], "clients": [0.7], "samples": [0.7]}
    put(
        tmp_path,
        recipe.id,
        "FedCRC",
        [70.0, 71.0],
        settings={**settings, "partition": fixed},
        history={"global": curve},
    )
    found = Files(tmp_path).readings(recipe, row, (), "accuracy")
    assert [reading.content["seed"] for reading in found] == [0]
