"""The tables of results by task in docs/tasks.md."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from scipy import stats

import coterie
from tools import tasks

ROOT = Path(__file__).parents[2]
LOCAL = {"0": 20.0, "1": 22.0, "2": 21.0}
DITTO = {"0": 18.0, "1": 19.5, "2": 18.7}
ENTRY = {
    "clients": 4, "metric": "RMSE", "higher": False, "share": False,
    "scores": {"Local": LOCAL, "FedAvg": {"0": 20.0, "1": 22.5, "2": 20.8}, "Ditto": DITTO},
    "origin": {"commit": "1234567", "torch": "2", "machine": "abacus", "date": "2026-01-01"},
}  # fmt: skip


def test_the_page_is_that_of_the_file() -> None:
    """If this fails: python -m tools.tasks"""
    assert tasks.page(ROOT) == (ROOT / tasks.PAGE).read_text(encoding="utf-8")


def test_every_comparison_is_of_a_command_on_the_page() -> None:
    page = (ROOT / tasks.PAGE).read_text(encoding="utf-8")
    found = [shlex.split(line) for line in re.findall(r"^coterie compare .* --seeds 5 .*$", page, re.M)]
    commands = {Path(words[-1]).name: words for words in found}
    entries = json.loads((ROOT / tasks.FILE).read_text(encoding="utf-8"))
    assert entries.keys() == commands.keys()
    for name, entry in entries.items():
        methods = {method.lower() for method in entry["scores"]} - {"fedavg-ft"}
        assert methods == set(commands[name][2 : commands[name].index("--dataset")])
        assert {tuple(by_seed) for by_seed in entry["scores"].values()} == {("0", "1", "2", "3", "4")}


def test_differences_against_scipy() -> None:
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in tasks.differences({"heart": ENTRY}).splitlines()
    ]
    by_pair = {(row[1], row[2]): row[3:] for row in rows[2:]}
    assert list(by_pair) == [("FedAvg", "Local"), ("Ditto", "Local"), ("Ditto", "FedAvg")]
    scores = {name: list(by_seed.values()) for name, by_seed in ENTRY["scores"].items()}  # type: ignore[attr-defined]
    ps = [stats.ttest_rel(scores[method], scores[against]).pvalue for method, against in by_pair]
    smallest = 3 * ps[1]
    assert ps[1] == min(ps)
    assert by_pair["Ditto", "Local"][1] == f"{smallest:.3f}"
    assert by_pair["Ditto", "Local"][2] == "better"
    assert by_pair["FedAvg", "Local"][2] == "no difference shown"
    low, high = stats.t.interval(0.95, 2, loc=-6.8 / 3, scale=stats.sem([2.0, 2.5, 2.3]))
    assert by_pair["Ditto", "Local"][0] == f"{-6.8 / 3:.2f} ± {(high - low) / 2:.2f}"
    higher = tasks.differences({"heart": ENTRY | {"higher": True}})
    assert "| Ditto | Local | -2.27 ± 0.63 |" in higher
    assert "worse" in higher
    assert "better" not in higher


@pytest.mark.long
def test_taking_a_comparison(tmp_path: Path) -> None:
    data = coterie.load_clients("heart-rate", normalise="auto")
    made = coterie.compare(
        ["local", "fedavg"], data, "linear", rounds=1, seeds=2, out=tmp_path / "heart", progress=False
    )
    entry = tasks.taken(tmp_path / "heart", "abc")
    assert (entry["clients"], entry["metric"], entry["higher"]) == (4, "RMSE", False)
    assert entry["scores"].keys() == {"Local", "FedAvg", "FedAvg-FT"}
    table = {row["method"]: row["rmse"] for row in made.table().to_dict("records")}
    for name, by_seed in entry["scores"].items():
        assert sum(by_seed.values()) / 2 == pytest.approx(table[name])
