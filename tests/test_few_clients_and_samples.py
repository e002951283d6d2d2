"""Four hospitals with few test patients: every number says how many clients or samples it is of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scipy import stats

import coterie
from coterie.cli import main


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("hospitals") / "run"
    main(["run", "fedavg", "--dataset", "heart-disease", "--model", "linear", "--rounds", "2", "--processes", "1",
          "--normalise", "auto", "--out", str(out)])  # fmt: skip
    return out


def wilson(correct: int, total: int) -> tuple[float, float]:
    found = stats.binomtest(correct, total).proportion_ci(method="wilson")
    return found.low, found.high


def test_the_table_says_that_the_worst_tenth_is_one_client(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    main(["run", "local", "--dataset", "heart-disease", "--model", "linear", "--rounds", "1", "--processes", "1",
          "--out", str(tmp_path / "r")])  # fmt: skip
    assert "worst 10 % (1 client)" in " ".join(capsys.readouterr().out.split())
    (outcome,) = json.loads((tmp_path / "r" / "result.json").read_text())["outcomes"]
    assert (outcome["clients"], outcome["worst10_clients"]) == (4, 1)


def test_evaluate_and_models_show_count_and_interval(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["evaluate", str(run), "--json"])
    told = json.loads(capsys.readouterr().out)["clients"]
    main(["models", str(run), "--json"])
    listed = json.loads(capsys.readouterr().out)
    for client, model in zip(told, listed, strict=True):
        expected = wilson(round(client["accuracy"] * client["samples"]), client["samples"])
        assert client["interval"] == pytest.approx(expected)
        assert model["interval"] == pytest.approx(expected)
        assert model["tested"] == client["samples"]
    first = told[0]["interval"]
    words = f"{100 * first[0]:.0f}-{100 * first[1]:.0f}"
    for command in ("evaluate", "models"):
        main([command, str(run)])
        text = " ".join(capsys.readouterr().out.split())
        assert "95 %: interval by the number of test samples (Wilson)" in text
        assert words in text


def test_in_python(run: Path) -> None:
    client = coterie.load_run(run).members[3]
    assert client.score is not None
    assert client.interval == pytest.approx(wilson(round(client.score * client.tested), client.tested))
