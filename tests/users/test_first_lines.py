"""What a run tells before its first round: on the terminal, in log.txt and to callers of run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import coterie
from coterie.cli import main

ROWS = [f"{20 + i},{('m', 'f')[i % 2]},{('ill', 'well')[i // 2 % 2]},{('north', 'south')[i // 20]}" for i in range(40)]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "patients.csv"
    path.write_text("\n".join(["age,sex,diagnosis,hospital", *ROWS]), encoding="utf-8")
    return path


def test_the_first_lines_tell_what_was_understood(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["run", "fedper", "--dataset", str(table), "--normalise", "auto", "--model", "linear", "--rounds", "2",
          "--lr", "0.25", "--momentum", "0.75", "--out", str(tmp_path / "run")])  # fmt: skip
    shown = capsys.readouterr().out
    before, _, _ = shown.partition("FedPer  round 1/2")
    ill, well = torch.bincount(coterie.load_clients(str(table)).train.y).tolist()
    logged = (tmp_path / "run" / "log.txt").read_text(encoding="utf-8")
    for said in (
        "data: patients, 2 clients (north, south), 30 training samples, 10 test samples",
        f"classes, with training samples: ill: {ill}, well: {well}",
        "samples: 2 columns (float32): age, sex",
        "one input per category: sex (f, m)",
        "standardized: 3 inputs",
        "network: linear, 0 numbers in the encoder, 8 in the head 'head', nothing frozen",
        "federation: 2 rounds, all clients in each, seed 0; clients run looped",
        "lr 0.25, weight decay 0.0005, momentum 0.75",
        "messages: down shared; up shared, personal, samples",
    ):
        assert said in before, said
        assert said in logged, said
    assert len(before.splitlines()) < 20


def test_a_comparison_tells_of_the_data_once(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["compare", "fedavg", "local", "--dataset", str(table), "--model", "linear", "--rounds", "1",
          "--out", str(tmp_path / "runs")])  # fmt: skip
    shown = capsys.readouterr().out
    assert shown.count("samples: 2 columns") == 1
    assert "messages: down weights; up weights, samples" in shown
    assert "method: Local" in shown


def test_json_is_all_that_is_printed(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["run", "local", "--dataset", str(table), "--rounds", "1", "--out", str(tmp_path / "run"), "--json"])
    assert capsys.readouterr().out.startswith("{")


def test_callers_are_told_of_frozen_parts_and_the_head(table: Path) -> None:
    network = nn.Sequential(nn.Linear(3, 5).requires_grad_(False), nn.ReLU(), nn.Linear(5, 4), nn.Linear(4, 2))
    data, told = coterie.load_clients(str(table)), list[str]()
    torch.manual_seed(0)
    coterie.run("fedper", data, network, rounds=1, show=told.append)
    (network_line,) = (line for line in told if line.startswith("network: "))
    assert network_line.startswith("network: 24 numbers in the encoder, 10 in the head '3'; 20 frozen numbers")
