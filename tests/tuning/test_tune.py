"""A search as a user meets it: what it chooses, what it never looks at, and how it goes on after anything."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import coterie
from coterie.cli import main, make_parser
from coterie.core.data import FederatedData, Split
from coterie.core.errors import CoterieError
from coterie.core.random import participants
from coterie.data.gather import folded, set_aside
from coterie.federation import Round
from coterie.federation.newcomers import keep_out
from coterie.methods import METHODS
from coterie.runs.stopping import Stopped
from coterie.tuning import Tuned, trials
from coterie.tuning.space import SEARCHES
from tests import toy

SIZES = (20, 10, 30, 15, 2)
HERE = coterie.Execution(backend="looped", processes=1)
SETTINGS: dict[str, Any] = {"local_epochs": 1, "batch_size": 10, "momentum": 0.0, "rounds": 4, "backend": HERE}


def clients() -> FederatedData:
    return toy.toy(train=SIZES, augmented=False)


def tune(out: Path, over: dict[str, Any], method: str = "fedavg", **changes: Any) -> Tuned:
    told: dict[str, Any] = {"data": clients(), "model": toy.network(), "final": False, **SETTINGS, **changes}
    return coterie.tune(method, over, out=out, **{name: value for name, value in told.items() if name not in over})


def numbers(tuned: Tuned) -> list[tuple[Any, ...]]:
    """All that a search found, but for the time it took."""
    return [(s.number, s.settings, s.scores, s.rounds, s.failed) for s in tuned.standings]


class Rounds:
    """Who looks on: which rounds were trained, by trial."""

    def __init__(self) -> None:
        self.seen: dict[str, list[int]] = {}

    @contextmanager
    def __call__(self, title: str, rounds: int) -> Iterator[Any]:
        own = self.seen.setdefault(title, [])

        def watch(record: Round) -> None:
            own.append(record.number)
            self.after(record)

        yield watch

    def after(self, record: Round) -> None:
        pass


class Sealed:
    """Test samples that nobody may touch."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the {name} of the test samples was read")


def test_a_part_is_set_aside() -> None:
    """By hand: a fifth of 20, 10, 30, 15 and 2 different samples, at least one."""
    data = clients()
    split = set_aside(data, 0.2)
    assert split.validation is not None
    assert split.validation.sizes == (4, 2, 6, 3, 1)
    assert split.train.sizes == (16, 8, 24, 12, 1)
    back = folded(split)
    assert back.train.sizes == data.train.sizes
    for i in range(data.num_clients):
        before, after = (
            sorted((*x.flatten().tolist(), y) for x, y in zip(*d.train.client(i), strict=True)) for d in (data, back)
        )
        assert before == after


def test_copies_stay_together() -> None:
    """Two clients with four different samples three times each; a client with one sample keeps it."""
    x = torch.arange(4).repeat(3).repeat(2)[:, None].float()
    x = torch.cat([x, torch.tensor([[9.0]])])
    train = Split(x, torch.zeros(25, dtype=torch.int64), (12, 12, 1))
    split = set_aside(FederatedData("copies", 2, train, train), 0.25)
    assert split.validation is not None
    assert split.validation.sizes == (3, 3, 0)
    for i in range(2):
        kept, held = (set(s.client(i)[0].flatten().tolist()) for s in (split.train, split.validation))
        assert (len(kept), len(held), kept & held) == (3, 1, set())


def test_a_grid_finds_the_planted_best(tmp_path: Path) -> None:
    """Without a learning rate nothing is learned. The number is that of a run with such a validation split."""
    tuned = tune(tmp_path / "t", {"lr": [0, 0.1], "momentum": [0.0, 0.9]}, seeds=2)
    assert [s.settings["lr"] for s in tuned.standings] == [0.1, 0.1, 0, 0]
    assert tuned.best == {"lr": 0.1, "momentum": 0.9}
    for standing in tuned.standings:
        for seed, accuracy in standing.scores.items():
            data = set_aside(clients(), 0.2)
            result = coterie.run("fedavg", data, toy.network(), seed=seed, **SETTINGS | standing.settings)
            assert result.history.curve("pre", "validation")[-1][1] == accuracy
    assert tuned.standings[2].scores == tuned.standings[3].scores  # those that learn nothing are alike


def test_the_test_samples_are_not_even_read(tmp_path: Path) -> None:
    data = replace(clients(), test=Sealed())  # type: ignore[arg-type]
    for search in SEARCHES:
        tuned = tune(tmp_path / search, {"lr": [0.01, 0.05, 0.1]}, data=data, search=search)
        assert len(tuned.standings) == 3
    with pytest.raises(AssertionError, match="test samples was read"):  # the seal works
        tune(tmp_path / "grid", {"lr": [0.01, 0.05, 0.1]}, data=data, final=True)


def test_other_test_labels_change_the_test_only(tmp_path: Path) -> None:
    data = clients()
    poisoned = replace(data, test=replace(data.test, y=(data.test.y + 1) % data.classes))
    over = {"lr": [0.001, 0.05]}
    a, b = (
        tune(tmp_path / str(i), over, data=d, final=True, local_epochs=4, momentum=0.9)
        for i, d in enumerate((data, poisoned))
    )
    assert numbers(a) == numbers(b)
    assert a.test is not None
    assert b.test is not None
    assert a.test["mean"] > 0.5 > b.test["mean"]


def test_validation_samples_that_came_with_the_data_are_used(tmp_path: Path) -> None:
    """And the last run trains on them too."""
    data = toy.toy(train=(20, 20, 20), test=(5, 5, 5), validation=(4, 6, 8), augmented=False)
    tuned = tune(tmp_path / "t", {"lr": [0.1]}, data=data, final=True)
    run = coterie.run("fedavg", data, toy.network(), lr=0.1, **SETTINGS)
    assert tuned.standings[0].scores == {0: run.history.curve("pre", "validation")[-1][1]}
    config = json.loads((tmp_path / "t" / "best-0000" / "config.json").read_text())
    assert config["data"]["train_sizes"] == [24, 26, 28]


def test_new_clients_have_no_part_in_the_choice(tmp_path: Path) -> None:
    tuned = tune(tmp_path / "t", {"lr": [0.1]}, new_clients=0.4, seeds=2)
    for seed, accuracy in tuned.standings[0].scores.items():
        known, _ = keep_out(set_aside(clients(), 0.2), 0.4, 0)  # those of the last run, whatever the seed
        run = coterie.run("fedavg", known, toy.network(), lr=0.1, seed=seed, **SETTINGS)
        assert run.history.curve("pre", "validation")[-1][1] == accuracy


@pytest.mark.parametrize(
    ("method", "title", "point", "trained"),
    [
        ("fedavg-ft", "FedAvg-FT", "finished", [1, 1, 2, 2, 3, 4, 4]),  # at the end of each stage, the fine-tuning
        ("ditto", "Ditto", "post", [1, 2, 3, 4]),
        ("scaffold", "SCAFFOLD", "pre", [1, 2, 3, 4]),
    ],
)
def test_halving_goes_on_exactly(method: str, title: str, point: str, trained: list[int], tmp_path: Path) -> None:
    """No round is trained twice, and what comes out is as if it had been trained in one go."""
    rounds, over = Rounds(), {"lr": [0.0, 0.05, 0.1, 0.02]}
    how: dict[str, Any] = {"join_ratio": 0.6, "full_last_round": False, "local_epochs": 1}
    tuned = tune(tmp_path / "t", over, method, watching=rounds, search="halving", eta=2, **how)
    best, second = tuned.standings[:2]
    assert (best.rounds, second.rounds) == (4, 2)
    assert rounds.seen[f"{title} lr={best.settings['lr']} seed 0, validation"] == trained
    for standing in (best, second):
        settings = {**SETTINGS, **how, **standing.settings, "rounds": standing.rounds}
        run = coterie.run(method, set_aside(clients(), 0.2), toy.network(), **settings)
        assert standing.scores == {0: run.history.curve(point, "validation")[-1][1]}
    assert not list((tmp_path / "t" / "checkpoints").iterdir())


def test_the_second_time_nothing_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    over = {"lr": [0.01, 0.1]}
    first = tune(tmp_path / "t", over, final=True)
    monkeypatch.setattr(trials, "federate", None)
    monkeypatch.setattr("coterie.api.driving.federate", None)
    assert tune(tmp_path / "t", {"lr": "0.01,0.1"}, final=True) == first


def test_another_search_is_refused(tmp_path: Path) -> None:
    tune(tmp_path / "t", {"lr": [0.01, 0.1]})
    for over, changes, said in (
        ({"lr": [0.01, 0.2]}, {}, "over.lr was [0.01, 0.1] and is [0.01, 0.2]"),
        ({"lr": [0.01, 0.1]}, {"rounds": 5}, "rounds was 4 and is 5"),
        ({"lr": [0.01, 0.1]}, {"validation": 0.3}, "validation was 0.2 and is 0.3"),
        ({"lr": [0.01, 0.1]}, {"data": toy.toy(train=SIZES[::-1], augmented=False)}, "data was"),
    ):
        with pytest.raises(CoterieError) as refused:
            tune(tmp_path / "t", over, **changes)
        assert "this is not the search that was started" in str(refused.value)
        assert said in str(refused.value)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("precious")
    with pytest.raises(CoterieError, match="is not the folder of a search"):
        tune(tmp_path / "full", {"lr": [0.1]})


def test_divergence_is_a_result(tmp_path: Path) -> None:
    tuned = tune(tmp_path / "t", {"lr": [1e30, 0.1]}, seeds=2, data=toy.toy(train=(20, 30, 25), test=(9, 9, 9)))
    assert tuned.best == {"lr": 0.1}
    assert tuned.standings[1].failed is not None
    assert "no client sent a finite update" in tuned.standings[1].failed
    assert "lr=1e+30 failed: round" in tuned.last_words()[0]
    assert [row[2] for row in tuned.table().rows][1] == "failed"
    with pytest.raises(CoterieError, match="failed with every setting"):
        tune(tmp_path / "all", {"lr": [1e30, 1e31]})


def test_a_choice_needs_somebody_to_measure(tmp_path: Path) -> None:
    """Only client 2 has samples to set aside; in this round it does not train, and Ditto is measured after training."""
    data = toy.toy(train=(1, 1, 20), test=(3, 3, 3))
    seed = next(s for s in range(99) if participants(s, 0, 3, 1).item() != 2)
    how: dict[str, Any] = {"seed": seed, "join_ratio": 0.34, "full_last_round": False, "rounds": 1, "data": data}
    with pytest.raises(CoterieError, match="no client that was measured after the last round has validation samples"):
        tune(tmp_path / "t", {"lr": [0.1]}, "ditto", **how)
    with pytest.raises(CoterieError, match="no client has two different training samples"):
        tune(tmp_path / "u", {"lr": [0.1]}, data=toy.toy(train=(1, 1), test=(3, 3)))


def test_time_ends_a_trial_between_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes 10 s with every record: of 70 s the first trial takes 50, four rounds and the last
    fine-tuning; so the second ends after two."""
    now, over = 0.0, {"lr": [0.01, 0.1, 0.2]}
    monkeypatch.setattr(trials.time, "monotonic", lambda: now)
    rounds = Rounds()

    def tick(record: Round) -> None:
        nonlocal now
        now += 10

    monkeypatch.setattr(rounds, "after", tick)
    tuned = tune(tmp_path / "t", over, budget_minutes=70 / 60, watching=rounds)
    assert rounds.seen == {
        "FedAvg lr=0.01 seed 0, validation": [1, 2, 3, 4, 4],
        "FedAvg lr=0.1 seed 0, validation": [1, 2],
    }
    assert tuned.untried == ["lr=0.1 (4 rounds)", "lr=0.2 (4 rounds)"]
    assert "The budget ended the search. Not tried: lr=0.1 (4 rounds); lr=0.2 (4 rounds)" in tuned.last_words()
    more = Rounds()
    tuned = tune(tmp_path / "t", over, watching=more)
    assert more.seen["FedAvg lr=0.1 seed 0, validation"] == [3, 4, 4]
    assert numbers(tuned) == numbers(tune(tmp_path / "whole", over))
    with pytest.raises(CoterieError, match="ended before one setting was measured; one takes 4 rounds"):
        tune(tmp_path / "nothing", over, budget_rounds=3)


def test_ctrl_c_ends_the_round_and_the_search_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds, over = Rounds(), {"lr": [0.01, 0.1]}

    def press(record: Round) -> None:
        if len(rounds.seen) == 2 and record.number == 2:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(rounds, "after", press)
    with pytest.raises(Stopped) as stop:
        tune(tmp_path / "t", over, "scaffold", watching=rounds)
    assert str(stop.value) == f"stopped; coterie.tune with out='{tmp_path / 't'}' resumes it"
    assert list(rounds.seen.values()) == [[1, 2, 3, 4], [1, 2]]
    more = Rounds()
    tuned = tune(tmp_path / "t", over, "scaffold", watching=more)
    assert list(more.seen.values()) == [[3, 4]]
    assert numbers(tuned) == numbers(tune(tmp_path / "whole", over, "scaffold"))


TINY = [
    "-nc",
    "4",
    "--local-size",
    "40",
    "--test-size",
    "20",
    "--model",
    "mlp",
    "--processes",
    "1",
    "--backend",
    "looped",
]


def asked(out: Path, *more: str) -> list[str]:
    return ["tune", "ditto", "--over", "lr=0.01,0.1", *TINY, "--rounds", "6", "--seeds", "2", "--out", str(out), *more]


DEADLY = """
import os, pathlib, signal, sys, time
from coterie.api import progress
from coterie.cli import main

class Deadly(progress.Lines):
    def __call__(self, record):
        saved = pathlib.Path(sys.argv[1], "checkpoints", "0000-seed1")
        if "seed 1" in self.title and record.number == 5:
            while not list(saved.glob("server-00000[234].safetensors")):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

progress.watcher = Deadly
main(sys.argv[2:])
"""


def test_a_killed_search_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """kill -9 in the second trial. The first is not run again, the second goes on, all numbers are the same."""
    words = [sys.executable, "-c", DEADLY, str(tmp_path / "cut"), *asked(tmp_path / "cut")]
    died = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert died.returncode == -signal.SIGKILL, died.stderr
    files = sorted((tmp_path / "cut" / "trials").iterdir())
    assert [path.name for path in files] == ["0000-seed0-rounds6.json"]
    before = files[0].stat()
    main(["tune", "--resume", str(tmp_path / "cut")])
    lines = capsys.readouterr().out.splitlines()
    trained = [line for line in lines if line.startswith("Ditto lr=0.01 seed") and " round " in line]
    assert all("seed 1" in line for line in trained)
    assert int(trained[0].partition(" round ")[2].partition("/")[0]) >= 3
    assert files[0].stat().st_mtime_ns == before.st_mtime_ns
    main(asked(tmp_path / "whole", "--json"))
    assert found(tmp_path / "cut") == found(tmp_path / "whole")


def found(folder: Path) -> tuple[Any, ...]:
    """What a search came to, but for the time it took and where."""
    told = json.loads((folder / "tuned.json").read_text())
    standings = [(s["settings"], s["scores"], s["rounds"], s["failed"]) for s in told["standings"]]
    return standings, told["best"], {name: value for name, value in told["test"].items() if name != "folder"}


@pytest.mark.slow
@pytest.mark.parametrize("search", ["grid", "halving"])
def test_ten_kills(search: str, tmp_path: Path) -> None:
    """kill -9 at random moments until the search is through; as if it had never been stopped."""
    draw, kills = random.Random(0), 0
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    more = ["--search", search, "--over", "lr=0.01,0.02,0.05,0.1", "--eta", "2", "--rounds", "150"]
    start = time.monotonic()
    subprocess.run([sys.executable, "-m", "coterie", *asked(whole, *more)], check=True, capture_output=True)
    long = time.monotonic() - start
    while not (cut / "tuned.json").exists():
        process = subprocess.Popen(
            [sys.executable, "-m", "coterie", *asked(cut, *more)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        try:
            process.communicate(timeout=draw.uniform(0.15, 0.35) * long if kills < 10 else None)
            assert process.returncode == 0
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            kills += 1
    assert kills > 1
    assert found(cut) == found(whole)
    assert not list((cut / "checkpoints").iterdir())


def test_the_command_at_the_end_gives_the_number_of_the_test(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--over", "combine=false", "keep-momentum=true", "lr=0.05..0.1", "--search", "random", "--trials", "2"]
    main(["tune", "FedPAC", *words, *TINY, "--rounds", "2", "--schedule", "steps:1=0.5:2=0.1", "--seed", "3", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert Path(told["folder"]).parent.name == "runs"
    command = shlex.split(told["command"])
    assert command[:3] == ["coterie", "run", "fedpac"]
    assert {"--no-combine", "--keep-momentum", "--schedule=steps:1=0.5:2=0.1"} < set(command)
    main([*command[1:], "--json"])
    assert json.loads(capsys.readouterr().out)["outcomes"][0]["mean"] == told["test"]["mean"]


def test_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tune", "local", "--over", "lr=0,0.05", *TINY, "--rounds", "2", "--seeds", "2", "--budget-rounds", "7"]
    for format, said in {
        "markdown": [
            "| rank | settings | validation | SD | rounds | seconds |",
            "| 1 | lr=0.0 |",
            "No test sample was used",
        ],
        "csv": ["rank,settings,validation,SD,rounds,seconds", "1,lr=0.0,"],
        "latex": [r"\toprule", r"$\pm$", r"lr=0.05, seed 1 (2 rounds)"],
        "terminal": ["To run the best setting:", "--lr=0.0", "measured once, after the choice"],
    }.items():
        main([*words, "--out", str(tmp_path / "t"), "--format", format])
        out = capsys.readouterr().out
        for text in said:
            assert text in out, format
    assert not list(tmp_path.glob("t/best-0001"))


def test_the_example_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parents[2] / "docs" / "tuning.md"
    (code,) = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M)
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    assert (tmp_path / "runs" / "fedrep" / "tuned.json").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give a method and what to search"),
        (["fedpac"], "give a method and what to search"),
        (["fedpak", "--over", "lr=1"], "unknown method 'fedpak': did you mean 'fedpac'"),
        (["fedpac", "--over", "lr"], "'lr' is not one"),
        (["fedpac", "--over", "lr=1", "lr=2"], "lr is given twice"),
        (["fedpac", "--over", "lr=-1,0.1"], "lr=-1.0: lr must be at least 0"),
        (["fedpac", "--over", "lr=0.1", "--lr", "0.2"], "lr is both set and searched"),
        (["fedpac", "--over", "lr=0.1", "--validation", "0"], "validation must be above 0 and less than 1, got 0.0"),
        (["fedpac", "--over", "lr=0.1", "--seeds", "0"], "seeds must be at least 1"),
        (["fedpac", "--over", "lr=0.1", "--budget-rounds", "0"], "the budget must be positive, got 0 rounds"),
        (["--resume", "nowhere"], "it has no search.json"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["tune", *words, *TINY, "--out", str(tmp_path / "t")])
    assert end.value.code == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("name", METHODS)
def test_no_flag_of_a_method_is_one_of_the_search(name: str) -> None:
    words = ["tune", name, "--over", "lr=1"]
    assert make_parser(words).parse_args(words).method == name
