"""Accuracies are those of PFLlib's implementations: rows and partition are in benchmarks/pfllib.py."""

from __future__ import annotations

import pytest

from benchmarks.pfllib import PAGE, ROUNDS, ROWS, TOLERANCE, Row, load, ours, page, theirs, title


def test_the_page_shows_the_stored_results() -> None:
    assert PAGE.read_text(encoding="utf-8") == page()
    rows = {row.key: row for row in ROWS}
    assert load()
    for key, found in load().items():
        assert found["round"] == ROUNDS
        assert abs(found["accuracy"] - theirs(rows[key])) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{title(row)} and {row.key}")
def test_accuracies_are_those_of_pfllib(row: Row) -> None:
    accuracy = ours(row)
    print(f"\n{title(row)} and {row.key}, round {ROUNDS}: {accuracy:.2f}, PFLlib {theirs(row):.2f} {row.why}")
    assert abs(accuracy - theirs(row)) <= TOLERANCE
