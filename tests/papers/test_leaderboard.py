"""The leaderboard: rules as data, equal budgets, no test sample in tuning, files that are merged or refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.analysis.significance import Spread
from coterie.api import Execution
from coterie.api.progress import unwatched
from coterie.cli import main
from coterie.core.errors import CoterieError
from coterie.data import divide, load
from coterie.methods import METHODS
from coterie.papers.leaderboard import BoardFolder, BoardRules, jobs_left, read_rules, run_board, summary
from coterie.papers.leaderboard.cells import BoardCircumstances, BoardJob, run_cell
from coterie.papers.leaderboard.rules import OWN
from coterie.tuning import trials

RULES = """
version: 1
trials: 3
tuning_seed: 100
validation: 0.25
seeds: [0, 1]
methods: [local, fedavg]
space: {lr: 0.01..0.5}
spaces: {ditto: {pull: 0.1..10}}
settings: {rounds: 1, lr: 0.05, batch_size: 50, local_epochs: 1}
sets: {quick: [few]}
benchmarks:
  - {id: few, dataset: fashion-mnist-small, model: linear,
     partition: {rule: dominant, num_clients: 4, local_size: 40, test_size: 20}}
  - {id: hospitals, dataset: heart-disease, model: linear, partition: {rule: natural}}
"""


def rules_of(folder: Path, text: str = RULES) -> BoardRules:
    path = folder / "rules.yaml"
    path.write_text(text, encoding="utf-8")
    return read_rules(path)


def command(folder: Path, *words: str) -> None:
    main(["leaderboard", "--rules", str(folder / "rules.yaml"), "--out", str(folder / "board"), *words])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with rules and a whole leaderboard: two methods run, one refuses the network."""
    folder = tmp_path_factory.mktemp("board")
    rules_of(folder)
    command(folder, "--processes", "1", "--methods", "local", "fedavg", "fedbn", "--format", "csv")
    return folder


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path


def read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))


# The rules.


def test_the_rules_of_coterie_covers_what_it_promises() -> None:
    rules = read_rules()
    assert len(rules.seeds) == 5
    pairs = {(b.recipe.dataset, b.recipe.partition["rule"]) for b in rules.benchmarks}
    for dataset in ("fashion-mnist", "cifar10", "cifar100", "fashion-mnist-small"):
        assert {(dataset, rule) for rule in ("dominant", "dirichlet-pac", "pathological", "rotation")} <= pairs
        alphas = {b.recipe.partition.get("alpha") for b in rules.benchmarks if b.recipe.dataset == dataset}
        assert {0.1, 0.5} <= alphas
    assert ("heart-disease", "natural") in pairs
    quick = {b.recipe.dataset for b in rules.chosen(["quick"])}
    assert quick == {"fashion-mnist-small", "heart-disease"}  # they run anywhere
    assert [b.id for b in rules.chosen(None)] == [b.id for b in rules.chosen(["quick"])]


@pytest.mark.long
def test_every_method_tries_as_many_settings() -> None:
    rules = read_rules()
    benchmark = rules.benchmarks[0]
    for method in METHODS:
        tried = rules.candidates(benchmark, method)
        assert len({json.dumps(one) for one in tried}) == rules.trials, method
        plan = benchmark.plan(method, {})
        own = {name: getattr(plan.method, name, getattr(plan.method.train, name, None)) for name in tried[0]}
        assert tried[0] == own, method  # its defaults
        for one in tried:
            benchmark.plan(method, one)  # allowed


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("rule: dominant", "rule: dominate"), "dominate"),
        (("tuning_seed: 100", "tuning_seed: 1"), "tuning_seed and seeds must all be different"),
        (("validation: 0.25", "validation: 1.5"), "validation must be between 0 and 1"),
        (("pull: 0.1..10", "push: 0.1..10"), "push"),
        (("quick: [few]", "quick: [many]"), "many"),
        (("id: hospitals", "id: few"), "duplicate id 'few'"),
        (("rule: natural", "rule: natural, seed: 3"), "draws its own partition"),
        (("trials: 3", "trials: 3\nwords: 3"), "words"),
    ],
)
def test_wrong_protocols_are_refused(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    with pytest.raises(CoterieError, match=said):
        rules_of(tmp_path, RULES.replace(*change))


def test_a_space_smaller_than_the_budget_is_refused(tmp_path: Path) -> None:
    rules = rules_of(tmp_path, RULES.replace("0.01..0.5", "[0.01, 0.05]"))
    with pytest.raises(CoterieError, match="has only 2 different settings"):
        rules.candidates(rules.benchmarks[0], "fedavg")


# Tuning and results.


@pytest.mark.long
def test_rules_that_mix_training_and_test_samples_are_refused(tmp_path: Path) -> None:
    rule = "rule: dirichlet, num_clients: 4"
    text = RULES.replace("rule: dominant, num_clients: 4, local_size: 40, test_size: 20", rule)
    rules = rules_of(tmp_path, text)
    job = BoardJob(rules, rules.benchmarks[0], "local", None, (0,))
    with pytest.raises(CoterieError, match="pools training and test samples"):
        job.data(0, None)


@pytest.mark.long
def test_seeds_draw_partitions_and_tuning_sees_no_test_sample() -> None:
    """Of the benchmarks with the included data, in all draws."""
    rules = read_rules()
    sources = {name: load(name) for name in ("fashion-mnist-small", "heart-disease")}
    for benchmark in rules.chosen(["quick"]):
        own = {name: value for name, value in benchmark.recipe.partition.items() if name not in ("rule", "seed")}
        rule, source = benchmark.recipe.partition["rule"], sources[benchmark.recipe.dataset]
        seeds = [{"seed": s} if benchmark.draws else {} for s in (*rules.seeds, rules.tuning_seed)]
        drawn = [divide(source, rule, **own, **seed) for seed in seeds]
        assert not any(partition.merged for partition in drawn)  # train and test are indices of different splits
        assert len({partition.hash for partition in drawn}) == (len(drawn) if benchmark.draws else 1)
        assert all(min(map(len, p.train)) > 1 and min(map(len, p.test)) > 0 for p in drawn)


@pytest.mark.long
def test_trials_are_scored_on_validation_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data of every trial: a share of the training samples for testing, and no test sample."""
    rules, seen = rules_of(tmp_path), list[Any]()
    job = BoardJob(rules, rules.benchmarks[0], "local", None, ())
    real: Callable[..., Any] = trials.federate

    def federate(clients: Any, *rest: Any, **more: Any) -> Any:
        seen.append(clients.data)
        return real(clients, *rest, **more)

    monkeypatch.setattr(trials, "federate", federate)
    run_cell(
        job, BoardFolder(tmp_path / "board", rules), BoardCircumstances(Execution(processes=1), None, "abc", 1, None)
    )
    full = job.data(rules.tuning_seed, None)
    known = {row.tobytes() for row in np.asarray(full.train.x)}
    assert len(seen) == rules.trials
    for data in seen:
        assert tuple(data.train.sizes) == (30,) * 4
        assert tuple(data.test.sizes) == (10,) * 4
        assert all(row.tobytes() in known for row in np.asarray(data.test.x))


@pytest.mark.long
def test_the_files_of_a_leaderboard(made: Path) -> None:
    names = {path.name for path in (made / "board" / "few").iterdir()}
    each = {f"{method}-{what}.json" for method in ("local", "fedavg") for what in ("tuning", "seed0", "seed1")}
    assert names == each | {"fedbn-tuning.json"}
    tuning = read(made / "board" / "few" / "fedavg-tuning.json")
    best = max(tuning["standings"], key=lambda one: one["mean"])
    assert tuning["settings"] == best["settings"]
    assert [len(one["scores"]) for one in tuning["standings"]] == [1] * 3
    for seed in (0, 1):
        result = read(made / "board" / "few" / f"fedavg-seed{seed}.json")
        assert result["settings"] == best["settings"]
        assert len(result["scores"]) == 4
        assert {"commit", "hardware", "libraries", "partition", "calibration"} <= result.keys()
    assert "normalization" in read(made / "board" / "few" / "fedbn-tuning.json")["refused"]
    assert not list((made / "board" / "searches").glob("*"))


def test_the_table_by_hand(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rules = read_rules(made / "rules.yaml")
    found = BoardFolder(made / "board", rules).load()
    board = summary(rules, found, list(rules.benchmarks), ["local", "fedavg", "fedbn", "ditto"])
    scores = [read(made / "board" / "few" / f"local-seed{seed}.json")["scores"] for seed in (0, 1)]
    spread, cell = Spread.of([sum(own) / 4 for own in scores]), board.cells["few", "Local"]
    assert spread.half is not None
    assert cell.text == f"{100 * spread.mean:.2f} ± {100 * spread.half:.2f}"
    assert cell.worst == pytest.approx(sum(min(own) for own in scores) / 2)  # a tenth of four clients: one
    assert board.cells["few", "Ditto"].text == "not run"
    assert board.cells["hospitals", "Local"].text == "not run"
    assert board.cells["few", "FedBN"].text == "refused"
    assert [reason[:2] for reason in board.reasons] == [("FedBN", "few")]
    assert board.ranking is not None
    assert set(board.ranking.ranks) == {"Local", "FedAvg"}
    command(made, "--show", "--format", "csv", "--methods", "local", "ditto", "--benchmarks", "all")
    assert capsys.readouterr().out.splitlines() == ["method,rank,few,hospitals", f"Local,-,{cell.text},not run",
                                                    "Ditto,-,not run,not run"]  # fmt: skip


@pytest.mark.long
def test_what_is_done_is_not_run_again(copied: Path) -> None:
    board = copied / "board" / "few"
    (board / "local-seed1.json").unlink()
    before = {path: path.stat().st_mtime_ns for path in board.iterdir()}
    kept = read(board / "local-seed0.json")
    command(copied, "--processes", "1", "--methods", "local", "fedavg", "fedbn", "--format", "csv")
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert read(board / "local-seed1.json")["settings"] == kept["settings"]


def test_the_time_limit_leaves_the_rest_for_later(tmp_path: Path) -> None:
    rules = rules_of(tmp_path)
    folder, lines = BoardFolder(tmp_path / "board", rules), list[str]()
    jobs = jobs_left(rules, rules.chosen(None), ["local"], [0], {})
    how: dict[str, Any] = {"how": Execution(processes=1), "data_dir": None, "commit": None, "say": lines.append}
    assert run_board(jobs, folder, max_seconds=1e-6, watching=unwatched, **how) == []
    assert "1 tunings of 3 settings each, and 1 trainings: about 1 min" in lines[0]
    assert lines[-1] == "--max-time is over; the same command continues"
    assert folder.load() == {}


# Files of other machines.


def test_results_are_packed_and_merged(copied: Path, tmp_path: Path) -> None:
    command(copied, "--show", "--format", "csv", "--pack", str(tmp_path / "all.tar.gz"))
    other = BoardFolder(tmp_path / "other", read_rules(copied / "rules.yaml"))
    assert other.merge([tmp_path / "all.tar.gz", copied / "board"]) == 7
    assert other.load() == BoardFolder(copied / "board", other.rules).load()
    assert other.merge([copied / "board"]) == 0


def change(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(read(path) | changes), encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        (
            "local-seed0.json",
            {"scores": [0.1, 0.2, 0.3, 0.4]},
            "seed0.json are both Local on few, seed 0, and differ in",
        ),
        ("local-seed0.json", {"scores": [0.1, 7.0]}, "between 0 and 1"),
        ("local-seed0.json", {"settings": {"lr": 9.0}}, "differ in settings"),
        ("local-seed0.json", {"protocol": "0123"}, "made under other rules"),
        ("local-seed0.json", {"seed": 7}, "seed 7 is not a seed of the rules"),
        ("local-tuning.json", {"settings": {"lr": 9.0}}, "differ in settings"),
        ("local-tuning.json", {"standings": []}, "0 settings, but every method tries 3"),
        ("local-tuning.json", {"benchmark": "none"}, "no benchmark 'none'"),
    ],
)
def test_conflicting_files_are_refused(
    made: Path, tmp_path: Path, name: str, changes: dict[str, Any], said: str
) -> None:
    mine = BoardFolder(tmp_path / "mine", read_rules(made / "rules.yaml"))
    assert mine.merge([made / "board"]) == 7
    shutil.copytree(made / "board", tmp_path / "theirs")
    (tmp_path / "mine" / "few" / "fedavg-seed0.json").unlink()
    change(tmp_path / "theirs" / "few" / name, **changes)
    with pytest.raises(CoterieError, match=said):
        mine.merge([tmp_path / "theirs"])
    assert not (tmp_path / "mine" / "few" / "fedavg-seed0.json").exists()  # nothing was merged


def test_provenance_is_no_conflict_and_settings_must_be_those_of_the_tuning(copied: Path, tmp_path: Path) -> None:
    mine = BoardFolder(tmp_path / "mine", read_rules(copied / "rules.yaml"))
    mine.merge([copied / "board"])
    change(copied / "board" / "few" / "local-seed0.json", seconds=99.0, commit="other", date="2027-01-01")
    assert mine.merge([copied / "board"]) == 0
    change(tmp_path / "mine" / "few" / "local-seed0.json", settings={"lr": 9.0})
    with pytest.raises(CoterieError, match="but Local was tuned to"):
        mine.load()
    (tmp_path / "mine" / "few" / "local-tuning.json").unlink()
    with pytest.raises(CoterieError, match=r"tuning that chose its settings is missing: few/local-tuning.json"):
        mine.load()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--benchmarks", "fewer"], "unknown benchmark 'fewer': did you mean 'few'?"),
        (["--methods", "fedpacc"], "fedpac"),
        (["--seeds", "5"], "5 is not among the seeds of the rules, 0, 1"),
        (["--jobs", "0"], "--jobs must be at least 1"),
        (["--max-time", "soon"], "max-time must be a time"),
        (["--merge", "nowhere"], "nowhere: no such folder or archive"),
        (["--merge", "rules.yaml"], "not an archive"),
        (["--show"], "has no results"),
        (["--rules", "none.yaml"], "none.yaml: cannot be read"),
    ],
)
def test_wrong_commands_say_what_is_wrong(
    here: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    rules_of(here)
    with pytest.raises(SystemExit) as ended:
        command(here, *words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_the_list_of_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    main(["leaderboard", "--list", "--format", "csv"])
    listed = capsys.readouterr().out
    assert "heart-natural,quick," in listed
    assert OWN.is_file()
