"""`coterie resume RUN --rounds N`, --until, --patience and --max-time, as typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coterie.cli import main
from tests.runs.test_checkpoint import assert_same, table

RUN = ["-nc", "4", "--local-size", "40", "--test-size", "20", "--processes", "1", "--model", "linear", "-jr", "0.5"]


def ended(out: Path) -> list[object]:
    told = json.loads((out / "result.json").read_text())["ended"]
    return [told["reason"], told["round"]]


def test_a_finished_run_is_extended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long, r = tmp_path / "long", tmp_path / "r"
    main(["run", "ditto", *RUN, "--rounds", "5", "--out", str(long)])
    main(["run", "ditto", *RUN, "--rounds", "2", "--out", str(r)])
    main(["resume", str(r)])
    assert "is finished; --rounds N extends it to N rounds" in capsys.readouterr().err
    main(["resume", str(r), "--rounds", "5"])
    assert_same(long, r)
    main(["resume", str(r), "--rounds", "5"])
    assert "is finished" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["resume", str(r), "--rounds", "4"])
    assert "has completed 5 rounds; rounds must be at least that, got 4" in capsys.readouterr().err


def test_until_and_then_more_rounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--rounds` asks for rounds: the condition that ended the run is not asked again."""
    long, r = tmp_path / "long", tmp_path / "r"
    main(["run", "fedavg", *RUN, "--rounds", "4", "--out", str(long)])
    main(["run", "fedavg", *RUN, "--rounds", "3", "--until", "accuracy>=0", "--out", str(r)])
    assert "FedAvg ended after round 1 of 3 by --until: accuracy>=0: accuracy is" in capsys.readouterr().out
    assert ended(r) == ["until", 1]
    main(["resume", str(r)])
    assert "is finished (ended after round 1 by --until: accuracy>=0" in capsys.readouterr().err
    main(["resume", str(r), "--rounds", "4"])
    assert ended(r) == ["rounds", 4]
    assert_same(long, r)


def test_patience_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "local", *RUN, "--rounds", "40", "--patience", "1", "--out", str(tmp_path / "no")])
    assert "patience needs a validation split" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()
    out = tmp_path / "r"
    main(["run", "local", *RUN, "--rounds", "40", "--patience", "1", "--validation", "0.3", "--out", str(out)])
    reason, number = ended(out)
    assert reason == "patience"
    assert isinstance(number, int)
    assert 2 <= number < 40
    best = [float(row["validation_pre_mean"]) for row in table(out)[:number]]
    assert best[-1] <= max(best[:-1])


def test_time_and_a_comparison(tmp_path: Path) -> None:
    """All runs end after one round by time; resumed with a longer time, they are those that had it from the start."""
    long, base = tmp_path / "long", tmp_path / "r"
    compare = ["compare", "fedavg", "fedper", *RUN]
    main([*compare, "--rounds", "3", "--out", str(long)])
    main([*compare, "--rounds", "3", "--max-time", "0.000001", "--out", str(base)])
    names = ["fedavg-seed0", "fedper-seed0"]
    assert [ended(base / name) for name in names] == [["max_time", 1]] * 2
    main(["resume", str(base), "--max-time", "1h"])
    for name in names:
        assert_same(long / name, base / name)
    main([*compare, "--rounds", "4", "--out", str(tmp_path / "longer")])
    main(["resume", str(base), "--rounds", "4"])
    for name in names:
        assert_same(tmp_path / "longer" / name, base / name)
    old, new = (json.loads((path / "compare.json").read_text()) for path in (tmp_path / "longer", base))
    assert [o["scores"] for o in old["outcomes"]] == [o["scores"] for o in new["outcomes"]]
