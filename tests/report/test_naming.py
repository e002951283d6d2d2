"""Names of runs: seeds of one training share a name, whatever else is shown with them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import coterie
from coterie.api.comparing import load_comparison
from coterie.cli import main
from coterie.report.figures import draw
from coterie.report.live import LivePage
from coterie.report.naming import details, entries, named
from coterie.report.seeds import grouped
from coterie.runs.finding import open_runs
from coterie.runs.stored_run import StoredRun
from tests import toy
from tests.signing import sign


class Written(StoredRun):
    """A run that measured nothing yet."""

    def __init__(self, path: str, seed: int = 0, start: str = "", data: dict[str, Any] | None = None, **settings: Any):
        super().__init__(path)
        self.config = {
            "method": {"name": "FedPAC", "class": "fedpac", "train": {"lr": 0.1, "batch_size": 10, **settings}},
            "federation": {"rounds": 3, "seed": seed},
            "model": {"start": start or f"first weights of seed {seed}"},
            "data": {"name": "toy", **(data or {})},
        }


def test_a_further_run_does_not_split_the_seeds_of_a_method() -> None:
    seeds = [Written("c/fedpac-seed0", 0), Written("c/fedpac-seed1", 1)]
    assert details(seeds) == ["", ""]
    assert details([Written("other", lr=0.2, batch_size=20, decay=0.1), *seeds]) == [
        ", lr 0.2, batch size 20, ...", ", lr 0.1, batch size 10", ", lr 0.1, batch size 10",
    ]  # fmt: skip
    assert details([Written("other", 1), *seeds]) == [" (other)", " (c)", " (c)"]
    assert details([Written("d/fedpac-seed0", 0), *seeds, Written("d/fedpac-seed1", 1)]) == [
        " (d)", " (c)", " (c)", " (d)",
    ]  # fmt: skip
    assert details([*seeds, Written("c/fedpac-seed2", 2, decay=0.1)]) == ["", "", ", decay 0.1"]


def test_settings_that_no_one_can_read_are_not_names() -> None:
    mild = {"partition": {"alpha": 0.5, "hash": "a" * 64}, "train_sizes": [10, 20]}
    hard = {"partition": {"alpha": 0.1, "hash": "b" * 64}, "train_sizes": [20, 10]}
    assert details([Written("a", data=mild), Written("b", data=hard)]) == [", alpha 0.5", ", alpha 0.1"]
    other = {**mild, "train_sizes": [20, 20]}
    assert details([Written("a", data=mild), Written("b", data=other)]) == [" (a)", " (b)"]


def test_names_are_unique_and_keep_to_the_label() -> None:
    runs = [Written("c/a", 0), Written("c/b", 1), Written("d/a", 0), Written("e/a", 0), Written("f", lr=0.2)]
    assert [name for _, name in named(runs)] == [
        "FedPAC, lr 0.1 (c), seed 0", "FedPAC, lr 0.1 (c), seed 1", "FedPAC, lr 0.1 (a, 1)", "FedPAC, lr 0.1 (a, 2)",
        "FedPAC, lr 0.2",
    ]  # fmt: skip


@pytest.mark.long
@pytest.mark.network
def test_table_report_figure_and_page_show_the_same_groups(tmp_path: Path) -> None:
    """Two seeds of Local, and one run more with three other settings, in a folder of its own."""
    first = tmp_path / "c" / "local-seed0"
    coterie.run(toy.method("local"), toy.toy(), "linear", rounds=1, backend=toy.IN_TURN, out=first)
    for name, seed, more in (("c/local-seed1", 1, {}), ("other", 0, {"lr": 0.7, "local_epochs": 9, "batch_size": 3})):
        shutil.copytree(first, tmp_path / name)
        config = json.loads((first / "config.json").read_text())
        config["federation"]["seed"] = seed
        config["method"]["train"] |= more
        config["model"]["start"] += str(seed)
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        sign(tmp_path / name)
    runs = open_runs([tmp_path])
    groups = grouped(runs)
    labels = {group.label: len(group.runs) for group in groups}
    assert sorted(labels.values()) == [1, 2]
    assert all(label.startswith("Local, ") and label.endswith(", ...") for label in labels)
    assert len({group.look.color for group in groups}) == 1
    assert len({group.look.dashes for group in groups}) == 2
    assert {entry.label for entry in entries(runs)} == {*labels}
    assert {name: len(rows) for name, rows in load_comparison(tmp_path).groups().items()} == labels
    assert sorted(text.get_text() for text in draw(runs, "curves").legends[0].get_texts()) == sorted(labels)
    main(["report", str(tmp_path), "--out", str(tmp_path / "report.html")])
    live = LivePage(0, [tmp_path])
    live.server.server_close()
    for text in ((tmp_path / "report.html").read_text(), live.news()):
        assert all(label in text for label in labels)
        assert not re.search(r"Local \((local-seed|other)", text)
