"""Runs that end before their last round: by a metric, by patience on a validation split, by time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from coterie.core.errors import CoterieError
from coterie.core.metric_scale import ACCURACY_SCALE
from coterie.execution import Scores
from coterie.federation import Ended, Ending, Round, Summary
from coterie.federation.ending import condition, metric_of, metrics_of, progress, reported_point, seconds
from tests.runs.test_checkpoint import assert_same, run, stopped, table


def scores(*accuracies: float) -> Scores:
    n = len(accuracies)
    correct = torch.tensor(accuracies, dtype=torch.float64) * 100
    return Scores(torch.arange(n), correct, torch.full((n,), 100), torch.full((n,), 0.7, dtype=torch.float64))


def measured(number: int, validation: float, test: float = 0.5) -> Round:
    found = {("pre", "validation"): scores(validation), ("pre", "test"): scores(test)}
    return Round(number, torch.arange(1), scores=found)


@pytest.mark.parametrize(
    ("text", "value"),
    {"2h": 7200, "90m": 5400, "1h30m": 5400, "45s": 45, "1.5h": 5400, "1d": 86400, "30": 30, "1h 30m": 5400}.items(),
)
def test_times(text: str, value: float) -> None:
    assert seconds(text) == value
    assert seconds(value) == value


@pytest.mark.parametrize("text", ["", "2 hours", "h", "-1", "0", "nan", "inf", "2h30", "0s"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(CoterieError, match=r"max-time must be a time such as 2h"):
        Ending(max_time=text)


@pytest.mark.parametrize(
    ("text", "said"),
    {
        "accuracy": "until must be a metric",
        "accuracy=0.9": "until must be a metric",
        "accurac>0.9": "did you mean 'accuracy'",
        "accuracy>90": "accuracy is between 0 and 1; did you mean 0.9?",
        "accuracy>-1": "accuracy is between 0 and 1",
        "accuracy>high": "'high' is not a number",
        "loss<nan": "'nan' is not a number",
        "finished_mean>0.9": "unknown metric",
    }.items(),
)
def test_what_is_no_condition(text: str, said: str) -> None:
    with pytest.raises(CoterieError, match=said.replace("?", r"\?")):
        Ending(until=text).check(["test"], ACCURACY_SCALE)


def test_metrics_by_hand() -> None:
    record = Round(3, torch.arange(3), scores={("post", "test"): scores(0.2, 0.5, 0.8), ("pre", "test"): scores(0.1)})
    assert metric_of(record, "accuracy", "post") == metric_of(record, "post_mean", "pre") == pytest.approx(0.5)
    assert metric_of(record, "worst10", "post") == pytest.approx(0.2)
    assert metric_of(record, "pre_worst10", "post") == pytest.approx(0.1)
    assert metric_of(record, "loss", "post") == pytest.approx(0.7)
    assert metric_of(record, "validation_accuracy", "post") is None
    assert condition(" accuracy >= 0.5 ", ACCURACY_SCALE) == ("accuracy", ">=", 0.5)
    assert Ending(until="accuracy>=0.5").reached([record], "post", 0) is not None
    assert Ending(until="accuracy>0.5").reached([record], "post", 0) is None
    assert Ending(until="loss<0.71").reached([record], "post", 0) is not None
    with pytest.raises(CoterieError, match=r"this method has no global_mean; it measures post_mean, pre_mean"):
        Ending(until="global_mean>0.5").reached([record], "post", 0)
    known = metrics_of(ACCURACY_SCALE)
    assert len(known) == len(set(known)) == 40


def test_patience_by_hand() -> None:
    """The best is round 2, the first of equals; rounds 3 and 4 are no better."""
    records = [measured(1, 0.3), measured(2, 0.6), measured(3, 0.6), measured(4, 0.5), Round(5, torch.arange(1))]
    assert progress(records, "pre") == (2, 2)
    assert Ending(patience=3).reached(records[:4], "pre", 0) is None
    ended = Ending(patience=2).reached(records[:4], "pre", 0)
    assert ended is not None
    assert (ended.reason, ended.round, ended.best_round) == ("patience", 4, 2)
    assert Ending(patience=2).reached(records[:3], "pre", 0) is None


def test_where_accuracy_is_measured() -> None:
    assert reported_point({"Ditto": "post"}, everyone=True) == "post"
    assert reported_point({"Ditto": "post"}, everyone=False) == "pre"  # of all clients, not of participants only
    assert reported_point({"FedCRC": "global", "FedCRC-Per": "pre"}, everyone=False) == "global"
    assert reported_point({"FedBABU": "finished"}, everyone=True) == "pre"


def test_until_ends_a_run_which_is_then_the_shorter_run(tmp_path: Path) -> None:
    """It is the run that had so many rounds from the start; with more rounds, the longer one."""
    history = run(tmp_path / "long", rounds=8, full_last_round=False).history
    losses = [Summary.of(record.scores["pre", "test"]).loss for record in history]
    number = next(n for n in range(2, 8) if losses[n - 1] < min(losses[: n - 1]))
    until = f"loss<={losses[number - 1]!r}"
    result = run(tmp_path / "r", rounds=8, until=until, full_last_round=False)
    assert result.ended is not None
    assert (result.ended.reason, result.ended.round) == ("until", number)
    assert until in result.ended.explanation
    told = json.loads((tmp_path / "r" / "result.json").read_text())
    assert told["ended"] == {**result.ended._asdict()}
    assert json.loads((tmp_path / "r" / "config.json").read_text())["ending"]["until"] == until
    run(tmp_path / "short", rounds=number, full_last_round=False)
    assert table(tmp_path / "r") == table(tmp_path / "short")
    again = run(tmp_path / "r", rounds=8, until=until, full_last_round=False, exist="resume")  # finished: nothing to do
    assert again.ended == result.ended
    run(tmp_path / "r", rounds=8, full_last_round=False, exist="resume")
    assert_same(tmp_path / "long", tmp_path / "r")


def test_patience_stops_and_a_stopped_run_ends_at_the_same_round(tmp_path: Path) -> None:
    more: dict[str, Any] = {"rounds": 60, "patience": 2, "full_last_round": False}
    whole = run(tmp_path / "whole", **more)
    assert whole.ended is not None
    assert whole.ended.reason == "patience"
    curve = whole.history.curve("pre", "validation")
    best = max(a for _, a in curve)
    first = next(n for n, a in curve if a == best)
    assert (whole.ended.round, whole.ended.best_round) == (first + 2, first)
    assert [n for n, _ in curve] == list(range(1, first + 3))
    for after in (1, first):  # once before the best round, once after it
        stopped(tmp_path / f"cut{after}", after, **more)
        run(tmp_path / f"cut{after}", exist="resume", **more)
        assert_same(tmp_path / "whole", tmp_path / f"cut{after}")


def test_killed_between_the_end_and_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The round that met the condition is in the checkpoint; no round is added."""
    more: dict[str, Any] = {"rounds": 8, "until": "accuracy>=0", "full_last_round": False}
    run(tmp_path / "whole", **more)
    monkeypatch.setattr("coterie.api.driving.Folder.finish", lambda *_: (_ for _ in ()).throw(MemoryError))
    with pytest.raises(MemoryError):
        run(tmp_path / "cut", **more)
    monkeypatch.undo()
    run(tmp_path / "cut", exist="resume", **more)
    assert_same(tmp_path / "whole", tmp_path / "cut")
    assert len(table(tmp_path / "cut")) == 1


def test_the_time_is_over(tmp_path: Path) -> None:
    """After the round in progress, which is measured; the run has models, and goes on."""
    more: dict[str, Any] = {"evaluate_every": 3, "full_last_round": False}
    run(tmp_path / "long", rounds=4, **more)
    result = run(tmp_path / "r", rounds=4, max_time=1e-9, **more)
    assert result.ended == Ended("max_time", 1, "1e-09 have passed")
    assert result.history.curve("pre")
    assert (tmp_path / "r" / "models").exists()
    run(tmp_path / "r", rounds=4, max_time="1h", exist="resume", **more)
    assert_same(tmp_path / "long", tmp_path / "r")


def test_patience_needs_a_validation_split() -> None:
    Ending(patience=1).check(["test", "validation"], ACCURACY_SCALE)
    for ending in (Ending(patience=1), Ending(until="validation_loss<1")):
        with pytest.raises(CoterieError, match=r"validation split.*--validation 0.1"):
            ending.check(["test"], ACCURACY_SCALE)
    with pytest.raises(CoterieError, match="patience must be at least 1, got 0"):
        Ending(patience=0)
