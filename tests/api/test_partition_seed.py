"""`--partition-seed vary`: every seed draws a partition of its own, and tables say what follows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import coterie
from coterie.cli import main
from coterie.core.errors import CoterieError
from coterie.papers.recipes import find
from coterie.papers.reproduce import cells, chosen_rows
from tests.runs.test_checkpoint import assert_same

SMALL: dict[str, Any] = {"num_clients": 4, "local_size": 40, "test_size": 20}
COMPARE = ["compare", "local", "fedavg", "-nc", "4", "--local-size", "40", "--test-size", "20", "--processes", "1",
           "--model", "linear", "--rounds", "2", "--seeds", "2"]  # fmt: skip


def partition(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "config.json").read_text())["data"]["partition"])


def test_in_python() -> None:
    drawn = [coterie.load_clients(**SMALL, partition_seed="vary", seed=seed, validation=0.2) for seed in (0, 1)]
    fixed = [coterie.load_clients(**SMALL, partition_seed=seed, validation=0.2) for seed in (0, 1)]
    for a, b in zip(drawn, fixed, strict=True):
        assert a.partition.hash == b.partition.hash
        assert a.validation is not None
        assert b.validation is not None
        assert (a.validation.x == b.validation.x).all()
    assert drawn[0].partition.hash != drawn[1].partition.hash
    assert [data.partition.settings["seed"] for data in drawn] == [0, 1]
    with pytest.raises(CoterieError, match="needs the seed of the run: pass seed=0"):
        coterie.load_clients(**SMALL, partition_seed="vary")
    with pytest.raises(CoterieError, match="must be a whole number or 'vary', got 'varied'"):
        coterie.load_clients(**SMALL, partition_seed="varied")
    with pytest.raises(CoterieError, match="the partition natural is not random"):
        coterie.load_clients("heart-disease", partition_seed="vary", seed=0)


def test_a_comparison_in_which_the_partition_varies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "r"
    main([*COMPARE, "--partition-seed", "vary", "--format", "markdown", "--out", str(out)])
    told = capsys.readouterr().out
    assert "each seed has its own partition, which the interval includes" in told
    assert "Paired t test" in told
    assert "worst 10 % (1 client)" in told
    hashes = {name: partition(out / name)["hash"] for name in ("local-seed0", "fedavg-seed0", "local-seed1")}
    assert hashes["local-seed0"] == hashes["fedavg-seed0"] != hashes["local-seed1"]
    assert [partition(out / f"local-seed{seed}")["seed"] for seed in (0, 1)] == [0, 1]
    rows = json.loads((out / "compare.json").read_text())["outcomes"]
    assert len({row["content"] for row in rows if row["seed"] == 0}) == 1
    main(["report", str(out), "--out", str(tmp_path / "report.html")])
    page = (tmp_path / "report.html").read_text()
    assert page.count("Paired t test") == 1  # one table of all seeds
    (out / "fedavg-seed1" / "result.json").unlink()  # as if killed
    (out / "compare.json").unlink()
    before = {path: path.read_bytes() for path in (out / "fedavg-seed1" / "models").iterdir()}
    main(["resume", str(out)])
    assert {path: path.read_bytes() for path in (out / "fedavg-seed1" / "models").iterdir()} == before


def test_a_comparison_on_one_partition(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([*COMPARE, "--format", "csv", "--out", str(tmp_path / "r")])
    tested = capsys.readouterr().out.split("method,against ")[1].splitlines()[1]
    assert tested.split(",")[2] == "4"  # clients, not 4 clients x 2 seeds
    assert partition(tmp_path / "r" / "local-seed1")["hash"] == partition(tmp_path / "r" / "local-seed0")["hash"]


def test_a_run_that_is_resumed_has_its_own_partition(tmp_path: Path) -> None:
    run = ["run", "fedavg", *COMPARE[3:-4], "--seed", "3", "--partition-seed", "vary"]
    main([*run, "--rounds", "3", "--out", str(tmp_path / "long")])
    main([*run, "--rounds", "2", "--out", str(tmp_path / "r")])
    main(["resume", str(tmp_path / "r"), "--rounds", "3"])
    assert partition(tmp_path / "r")["seed"] == 3
    assert_same(tmp_path / "long", tmp_path / "r")


def test_a_seed_shuffles_the_samples_and_nothing_else() -> None:
    """Dominant classes: as many of each class on each client; without a seed, the order of the dataset."""
    plain, again = (coterie.load_clients(**SMALL, partition="dominant") for _ in range(2))
    drawn = coterie.load_clients(**SMALL, partition="dominant", partition_seed=0)
    assert plain.partition.hash == again.partition.hash != drawn.partition.hash
    for client in range(4):
        for split in ("train", "test"):
            counts = [getattr(data, split).client(client)[1].bincount(minlength=10) for data in (plain, drawn)]
            assert counts[0].tolist() == counts[1].tolist()
    everyone = np.concatenate(drawn.partition.train)
    assert len(np.unique(everyone)) == len(everyone)  # still nobody shares a sample


def test_in_recipes() -> None:
    recipe = find("P1-T1-CIFAR10-20")
    own = cells([(recipe, chosen_rows(recipe, ["fedavg"]))], 3, None)
    assert len({cell.data for cell in own}) == 1
    varied = recipe.with_partition_seed("vary")
    drawn = cells([(varied, chosen_rows(varied, ["fedavg"]))], 3, None)
    assert sorted(dict(cell.data[3])["seed"] for cell in drawn) == [0, 1, 2]
    assert {cell.plan.hash for cell in drawn}.isdisjoint(cell.plan.hash for cell in own)  # kept apart
    with pytest.raises(CoterieError, match="must be a whole number or vary"):
        recipe.with_partition_seed("often")
