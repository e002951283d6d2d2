"""The smoke test of all methods: its table by hand, what is missing, and files that are wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tools.leaderboard import kept, replaced
from tools.ledger import leaderboard

from coterie.core.errors import CoterieError
from coterie.methods import METHODS
from coterie.papers.results import committed


def outcome(method: str, mean: float) -> dict[str, Any]:
    numbers = {"mean": mean, "std": 0.0312, "worst10": 0.25, "megabytes": 12.34}
    return {"method": method, "seed": 0, "reported": "pre", **numbers}


def found(outcomes: list[dict[str, Any]], **refused: str) -> dict[str, Any]:
    """What the command keeps of the output of `coterie compare --json`."""
    output = {"data": "tiny", "clients": 4, "metric": "accuracy", "refused": refused, "outcomes": outcomes}
    normalized = {"outcomes": [outcome("FedAvg", 0.75), outcome("FedBN", 0.8)]}
    return kept(output, normalized, 119.0)


def everyone() -> list[dict[str, Any]]:
    return [outcome(next(iter(kind.results)), 0.5) for name, kind in METHODS.items() if name not in ("fedper", "fedbn")]


def write(folder: Path, content: object) -> Path:
    (folder / "leaderboard.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def test_the_best_come_first_with_their_family(tmp_path: Path) -> None:
    made = found([*everyone(), outcome("FedPer", 0.7254)], FedBN="no layers to keep", FedReG="one reason")
    blocks = leaderboard.blocks(write(tmp_path, made))
    about, _, header, _, first, *_ = blocks["smoke"].splitlines()
    assert f"{len(METHODS) - 1} results on 4 clients of `tiny`, seed 0" in about
    assert "2 minutes in all" in about
    assert header.startswith("| method | family | accuracy |")
    assert first == "| FedPer | personal head | 72.54 | 3.12 | 25.00 | `pre` | 12.3 |"
    assert [line[:10] for line in blocks["smoke-normalized"].splitlines()[4:]] == ["| FedBN | ", "| FedAvg |"]
    assert blocks["smoke-normalized"].startswith("On conv4 with BatchNorm")
    assert blocks["smoke-refused"].endswith("\n\n- **FedReG**: one reason")  # FedBN ran on the other network


def test_rows_that_were_made_again_name_their_commit(tmp_path: Path) -> None:
    made = found([*everyone(), outcome("FedPer", 0.7254)], FedBN="no layers to keep")
    again = {"outcomes": [outcome("FedPer", 0.9), outcome("SuPerFed", 0.8)]}
    normalized = {"outcomes": [outcome("FedBN", 0.7)]}
    blocks = leaderboard.blocks(write(tmp_path, replaced(made, again, normalized)))
    about, _, _, _, first, second, third, *_ = blocks["smoke"].splitlines()
    commit = committed(Path("src/coterie"))
    assert f" (SuPerFed, FedPer: {commit}), " in about
    assert [row.split(" | ")[2] for row in (first, second, third)] == ["90.00", "80.00", "50.00"]
    assert blocks["smoke-normalized"].startswith(
        f"On conv4 with BatchNorm, for methods that need normalization layers (FedBN: {commit}):"
    )


def test_a_method_that_is_missing_is_named(tmp_path: Path) -> None:
    write(tmp_path, found(everyone(), FedBN="no layers to keep"))
    with pytest.raises(CoterieError, match=r"leaderboard.json: FedPer neither ran nor was refused"):
        leaderboard.blocks(tmp_path)


@pytest.mark.parametrize("content", [[], {}, {"outcomes": [{"method": "FedPer"}], "refused": {}}])
def test_other_files_are_errors(tmp_path: Path, content: object) -> None:
    with pytest.raises(CoterieError, match=r"leaderboard.json: not written by `python -m tools.leaderboard`"):
        leaderboard.blocks(write(tmp_path, content))
