"""Running recipes: small files, nothing run twice, nothing mixed, and numbers that are those of the runs."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

import coterie
from coterie.analysis import terminal
from coterie.api import Execution
from coterie.api.progress import Lines
from coterie.cli import main
from coterie.core.errors import CoterieError
from coterie.data import is_available
from coterie.execution import Scores
from coterie.federation import Ended, Ending, History, Round
from coterie.papers import reproduce as module
from coterie.papers import tables
from coterie.papers.matching import covers
from coterie.papers.recipes import Recipe, find, matches, read_recipe, recipes
from coterie.papers.reproduce import cells, chosen_rows, duration, forecast, reproduce, results
from coterie.papers.results import Shelf, accuracies, last_trained, outcome, stem
from coterie.papers.tables import report
from coterie.papers.unfinished import UNFINISHED
from coterie.papers.verdicts import RunNoise

RECIPE = """\
id: mine
paper: Ours
place: Table 1
protocol: pac
dataset: fashion-mnist-small
partition: {rule: dominant, num_clients: 4, noniid_s: 20, local_size: 40, test_size: 20}
model: linear
settings: {rounds: 2, join_ratio: 1.0, local_epochs: 1, batch_size: 20, lr: 0.1, momentum: 0.5, weight_decay: 0.0}
vary: {local_epochs: [1, 2]}
report: last
average: clients
records: {head_weights: [2]}
rows:
  - {name: Alone, method: local, reading: code, published: [{local_epochs: 1, accuracy: 50.0}]}
  - {name: FedAvg, method: fedavg}
  - {name: Tuned, method: fedavg-ft}
  - {name: FedPAC, method: fedpac}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    path = tmp_path / "mine.yaml"
    path.write_text(RECIPE)
    return read_recipe(path)


def go(recipe: Recipe, folder: Path, methods: tuple[str, ...] = (), **settings: Any) -> list[str]:
    usual: dict[str, Any] = {"seeds": 2, "rounds": None, "data_dir": None, "commit": "abc"}
    quiet = {"watching": lambda title, rounds: Lines(title, rounds, None), "how": Execution(processes=1)}
    return reproduce([(recipe, chosen_rows(recipe, methods))], Shelf(folder), **usual | quiet | settings)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The methods that are really trained, one entry for each training."""
    names: list[str] = []
    run = module.execute

    def counted(method: Any, *rest: Any, **more: Any) -> Any:
        result = run(method, *rest, **more)
        names.append(f"{method.title} {method.train.local_epochs} {more['seed']}")
        return result

    monkeypatch.setattr(module, "execute", counted)
    return names


def test_every_cell_once(recipe: Recipe, tmp_path: Path, trained: list[str]) -> None:
    assert go(recipe, tmp_path / "out") == []
    wanted = [f"{m} {e} {s}" for e in (1, 2) for m in ("Local", "FedAvg", "FedPAC") for s in (0, 1)]
    assert trained == wanted  # FedAvg-FT is of FedAvg's training
    files = sorted((tmp_path / "out" / "mine").iterdir())
    assert len(files) == 12
    assert all(path.suffix == ".json" and path.stat().st_size < 10_000 for path in files)
    go(recipe, tmp_path / "out")
    assert trained == wanted  # nothing again
    go(recipe, tmp_path / "out", seeds=3, methods=("local",))
    assert trained[12:] == ["Local 1 2", "Local 2 2"]


def test_a_file_tells_what_a_run_gives(recipe: Recipe, tmp_path: Path) -> None:
    go(recipe, tmp_path / "out", methods=("fedpac",), seeds=1)
    (path,) = (tmp_path / "out" / "mine").glob("fedpac-local_epochs-2-seed0-*.json")
    content = json.loads(path.read_text())
    data = coterie.load_clients("fashion-mnist-small", num_clients=4, noniid_s=20, local_size=40, test_size=20)
    again = coterie.run(
        "fedpac", data, "linear", backend=Execution(processes=1), rounds=2, local_epochs=2, batch_size=20, lr=0.1,
        momentum=0.5, weight_decay=0.0, seed=0,
    )  # fmt: skip
    assert content["history"]["pre"]["clients"] == pytest.approx([a for _, a in again.history.curve("pre")], abs=1e-6)
    correct = [
        int((again.personal_model(i)(x).argmax(1) == y).sum()) for i in range(4) for x, y in [data.test.client(i)]
    ]
    assert content["last"]["pre"] == {"client": [0, 1, 2, 3], "correct": correct, "total": [20] * 4}
    assert accuracies(content, "pre") == {i: k / 20 for i, k in enumerate(correct)}
    assert outcome(content, "pre", "last", "clients") == pytest.approx(100 * sum(correct) / 80, abs=1e-4)
    torch.testing.assert_close(
        torch.tensor(content["records"]["head_weights"]["2"]), again.history[1].report["head_weights"].float()
    )
    assert data.partition is not None
    assert content["partition"] == data.partition.hash
    known = {
        "recipe": "mine",
        "method": "fedpac",
        "value": {"local_epochs": 2},
        "seed": 0,
        "rounds": 2,
        "reduced": False,
    }
    assert {name: content[name] for name in known} == known
    assert content["commit"] == "abc"
    assert {"torch", "numpy", "python"} <= set(content["libraries"])
    assert content["hardware"]["machine"]
    assert content["seconds"]["total"] > 0


def test_an_interrupted_call_goes_on(
    recipe: Recipe, tmp_path: Path, trained: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = module.execute

    def stopped(*rest: Any, **more: Any) -> Any:
        if len(trained) == 3:
            raise KeyboardInterrupt
        return counted(*rest, **more)

    monkeypatch.setattr(module, "execute", stopped)
    with pytest.raises(KeyboardInterrupt, match="stopped; finished results are kept, and the same command continues"):
        go(recipe, tmp_path / "out")
    assert len(list((tmp_path / "out").rglob("*"))) == 1 + 3  # the recipe's folder, whole files, and nothing else
    monkeypatch.setattr(module, "execute", counted)
    go(recipe, tmp_path / "out")
    assert len(trained) == len(set(trained)) == 12


ONE: dict[str, Any] = {"seeds": 1, "how": Execution(), "data_dir": None, "commit": "abc"}


def watched(seen: list[Round]) -> Callable[[str, int], Any]:
    return lambda title, rounds: nullcontext(seen.append)


def cut_off(rounds: int, now: Callable[[], bool]) -> Callable[..., Ended | None]:
    """Instead of `Ending.reached`: the time is over after so many rounds."""

    def reached(ending: Ending, records: Sequence[Round], point: str, spent: float) -> Ended | None:
        late = ending.max_time is not None and len(records) >= rounds and now()
        return Ended("max_time", len(records), "") if late else None

    return reached


@pytest.mark.long
@pytest.mark.parametrize("method", ["fedpac", "local"])
def test_the_same_command_continues_after_the_time_limit(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Every call has time for one round: the third finishes a training of three, which is the one never stopped."""
    whole, cut, seen = Shelf(tmp_path / "whole"), Shelf(tmp_path / "cut"), list[Round]()
    one = replace(recipe, vary={"local_epochs": [1]}, records={"head_weights": [1, 3]})
    selection = [(one, chosen_rows(one, [method]))]
    reproduce(selection, whole, rounds=3, watching=watched([]), **ONE)

    for rounds in (1, 2, 3):
        assert not list(cut.folder.glob("mine/*"))
        seen.clear()
        monkeypatch.setattr(Ending, "reached", cut_off(rounds, lambda: True))
        assert reproduce(selection, cut, rounds=3, max_seconds=60, watching=watched(seen), **ONE) == []
        assert [record.number for record in seen] == [rounds]
    (made,), (wanted,) = ([json.loads(p.read_text()) for p in s.folder.glob("mine/*.json")] for s in (cut, whole))
    for name in ("history", "last", "records", "rounds", "partition", "bytes_up", "hash"):
        assert made[name] == wanted[name], name
    assert made["seconds"]["total"] >= made["seconds"]["train"] > 0
    assert not list((cut.folder / UNFINISHED).iterdir())


@pytest.mark.long
def test_the_time_limit_leaves_the_rest_for_later(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two trainings is stopped after two of three rounds, and finished by a call without a limit."""
    shelf, lines, seen = Shelf(tmp_path / "results"), list[str](), list[Round]()
    selection = [(recipe, chosen_rows(recipe, ["local"]))]
    with monkeypatch.context() as patch:
        patch.setattr(Ending, "reached", cut_off(2, lambda: len(seen) > 3))
        patch.setattr(module, "over", lambda deadline: deadline is not None and len(seen) >= 5)
        failed = reproduce(selection, shelf, rounds=3, max_seconds=60, watching=watched(seen), say=lines.append, **ONE)
        assert failed == []
    assert len(seen) == 5
    assert len(list(shelf.folder.glob("mine/*.json"))) == 1
    assert lines == ["--max-time is over; the same command continues"]
    assert reproduce(selection, shelf, rounds=3, max_seconds=1e-9, watching=watched(seen), **ONE) == []
    assert len(list(shelf.folder.glob("mine/*.json"))) == 1
    other = Shelf(shelf.folder.with_name("other"))
    shutil.copytree(shelf.folder, other.folder)
    assert reproduce(selection, shelf, rounds=3, watching=watched(seen), **ONE) == []
    assert len(seen) == 6  # the third round alone
    assert reproduce(selection, other, rounds=3, watching=watched(seen), **ONE | {"commit": "def"}) == []
    assert len(seen) == 9  # no result is of two commits
    assert len(list(shelf.folder.glob("mine/*.json"))) == 2


@pytest.mark.long
def test_a_training_that_was_cut_off_before_it_began_starts_again(recipe: Recipe, tmp_path: Path) -> None:
    shelf, seen = Shelf(tmp_path / "results"), list[Round]()
    one = replace(recipe, vary={"local_epochs": [1]})
    (cell,) = cells([(one, chosen_rows(one, ["local"]))], 1, 2)
    folder = shelf.folder / UNFINISHED / f"mine-{stem('local', cell.value, cell.plan, 0)}-abc"
    folder.mkdir(parents=True)
    (folder / "log.txt").write_text("", encoding="utf-8")
    assert reproduce([(one, [cell.row])], shelf, rounds=2, max_seconds=60, watching=watched(seen), **ONE) == []
    assert len(seen) == 2
    assert not folder.exists()


def test_a_damaged_file_is_run_again(recipe: Recipe, tmp_path: Path, trained: list[str]) -> None:
    go(recipe, tmp_path / "out", methods=("local",), seeds=1)
    first = next((tmp_path / "out" / "mine").iterdir())
    whole = json.loads(first.read_text())
    first.write_text(first.read_text()[:-40])
    go(recipe, tmp_path / "out", methods=("local",), seeds=1)
    assert len(trained) == 3
    again = json.loads(first.read_text())
    assert again["history"] == whole["history"]


def test_a_file_that_lacks_something_counts_as_not_run(
    recipe: Recipe, tmp_path: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    go(recipe, tmp_path / "out", methods=("local",), seeds=1)
    path = next((tmp_path / "out" / "mine").glob("*epochs-1*"))
    content = json.loads(path.read_text())
    del content["history"]
    path.write_text(json.dumps(content))
    main(["reproduce", "mine.yaml", "--methods", "local", "--seeds", "1", "--out", "out", "--show", "--format", "csv"])
    told = capsys.readouterr()
    assert f"{path.relative_to(tmp_path)}: history is missing; the training counts as not run" in told.err
    assert [line.split(",")[8] for line in told.out.splitlines()[1:3]] == ["not run", "-"]


def test_reduced_rounds_are_kept_apart(recipe: Recipe, tmp_path: Path) -> None:
    shelf, rows = Shelf(tmp_path / "out"), chosen_rows(recipe, ["Alone"])
    go(recipe, tmp_path / "out", methods=("Alone",), rounds=1)
    full, reduced = (report(recipe, rows, results(recipe, rows, shelf, 2, rounds))[0] for rounds in (None, 1))
    at = full.header.index("verdict")
    assert [row[at] for row in full.rows] == ["not run"] * 2
    assert [row[at] for row in reduced.rows] == ["reduced"] * 2
    assert {row[full.header.index("difference")] for row in reduced.rows} == {"-"}
    same = report(recipe, rows, results(recipe, rows, shelf, 2, 2))[0]
    assert [row[at] for row in same.rows] == ["not run"] * 2  # --rounds as in the paper is not reduced


def test_another_recipe_finds_the_same_training(recipe: Recipe, tmp_path: Path, trained: list[str]) -> None:
    go(recipe, tmp_path / "out", methods=("local",), seeds=1)
    path = tmp_path / "other.yaml"
    head = (
        RECIPE.replace("id: mine", "id: other")
        .replace("local_epochs: [1, 2]", "local_epochs: [2, 3]")
        .split("rows:")[0]
    )
    path.write_text(f"{head}rows: [{{name: Local-only, method: local}}]\n")
    go(read_recipe(path), tmp_path / "out", seeds=1)
    assert trained == ["Local 1 0", "Local 2 0", "Local 3 0"]


def result(accuracy: float, clients: list[int]) -> dict[str, Any]:
    curve = {"round": [1, 2], "clients": [0.9, accuracy], "samples": [0.9, accuracy]}
    last = {"client": [0, 1, 2], "correct": clients, "total": [100] * 3}
    told = dict.fromkeys(("recipe", "method", "date", "precision", "commit"), "mine")
    made = {"hardware": {"machine": "m"}, "libraries": {"torch": "2"}, "seconds": {"total": 1.0}}
    history = {"post": curve, "pre": curve, "finished": curve}
    return {**told, **made, "history": history, "last": {"post": last, "pre": last}}


def test_the_table_by_hand(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone is published with 50.00 at one epoch; the noise of 0.3 points gives a band of ± 0.83."""
    noises = {("fashion-mnist-small", "seeds"): RunNoise(0.3, 20, 10)}
    monkeypatch.setattr(tables, "measured_noise", lambda: noises)
    shelf = Shelf(tmp_path / "out")
    rows = chosen_rows(recipe, ["local", "fedpac"])
    plans = {row.name: recipe.plan(row, recipe.values[0]) for row in rows}
    for seed, accuracy in enumerate((0.51, 0.52, 0.515)):
        for name, value in (("Alone", accuracy), ("FedPAC", accuracy + 0.2)):
            own = result(value, [50, 60, 40 + seed] if name == "Alone" else [70, 81 + seed, 63 + 2 * seed])
            shelf.add("mine", name, (), plans[name], seed, {**own, "settings": plans[name].settings, "seed": seed})
    table, tests = report(recipe, rows, results(recipe, rows, shelf, 3, None))
    line = dict(zip(table.header, table.rows[0], strict=True))
    assert line == {
        "method": "Alone", "local_epochs": "1", "published": "50.00", "ours": "51.50", "std": "0.50", "±": "0.60",
        "difference": "+1.50", "band": "0.83", "verdict": "off", "seeds": "3", "reading": "code", "read at": "post",
    }  # fmt: skip
    assert table.rows[2][2:10] == ["-", "71.50", "0.50", "0.60", "-", "-", "-", "3"]
    assert table.rows[1][8] == "not run"
    ((name, difference, pairs, *_, verdict),) = tests.rows
    assert (name, pairs, verdict) == ("Alone", "3", "no difference shown")  # three clients, each over its seeds
    assert float(difference) == pytest.approx(100 * (150 + 151 + 152 - 214 - 217 - 220) / 900, abs=0.01)
    for middle, verdict in ((0.50, "met"), (0.505, "undecided")):
        for seed in range(3):
            own = {**result(middle, [50, 60, 40]), "settings": plans["Alone"].settings, "seed": seed}
            shelf.add("mine", "Alone", (), plans["Alone"], seed, own)
        assert report(recipe, rows, results(recipe, rows, shelf, 3, None))[0].rows[0][8] == verdict


def test_the_time_is_told_before_a_long_reproduction(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round of the first training takes 3 seconds; the second has more steps, by its epochs."""
    todo = cells([(recipe, chosen_rows(recipe, ["local"]))], 1, 600)
    ratio = todo[1].plan.work / todo[0].plan.work
    record = SimpleNamespace(seconds={"train": 2.0, "evaluate": 1.0})
    told = dict[str, Any]()

    def execute(*given: Any, **settings: Any) -> Any:
        told.update(settings)
        return SimpleNamespace(history=[record, record])

    monkeypatch.setattr("coterie.papers.reproduce.execute", execute)
    said = forecast(todo, Execution(processes=1), None)
    assert told["rounds"] == 2
    assert said.startswith("2 trainings of ")
    assert f"about {duration(3 * 600 * (1 + ratio))} one after the other, judging from a round of Alone" in said
    assert (duration(1), duration(3600), duration(5400)) == ("1 min", "1 h 0 min", "1 h 30 min")


def test_which_rounds_make_the_number() -> None:
    curve = {"round": [*range(12)], "clients": [0.1, 0.9, *[0.2] * 9, 0.3], "samples": [None] * 11 + [0.4]}
    content = {"history": {"pre": curve}}
    assert outcome(content, "pre", "last", "clients") == pytest.approx(30)
    assert outcome(content, "pre", "best", "clients") == pytest.approx(90)
    assert outcome(content, "pre", "best of every tenth", "clients") == pytest.approx(20)  # rounds 0 and 10
    assert outcome(content, "pre", "mean of last 10", "clients") == pytest.approx(10 * (9 * 0.2 + 0.3))
    assert outcome(content, "pre", "last", "samples") == pytest.approx(40)
    assert outcome(content, "global", "last", "samples") is None


def test_models_as_last_trained() -> None:
    """Client 0 trains in round 1, both in round 2, client 1 in round 3."""

    def of(number: int, clients: list[int], correct: list[int], total: list[int]) -> Round:
        scores = Scores(*map(torch.tensor, (clients, correct, total)), torch.zeros(len(clients)))
        return Round(number, torch.tensor(clients), scores={("post", "test"): scores})

    history = History([of(1, [0], [5], [10]), of(2, [0, 1], [8, 10], [10, 40]), of(3, [1], [20], [40])])
    curve, latest = last_trained(history)
    assert curve == {"round": [2, 3], "clients": [0.525, 0.65], "samples": [0.36, 0.56]}
    assert latest == {"client": [0, 1], "correct": [8, 20], "total": [10, 40]}


def test_one_that_fails_stops_nothing(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: list[str]
) -> None:
    counted: Callable[..., Any] = module.execute

    def picky(method: Any, *rest: Any, **more: Any) -> Any:
        if method.title == "FedAvg" and more["seed"] == 0:
            raise CoterieError("training diverged")
        return counted(method, *rest, **more)

    monkeypatch.setattr(module, "execute", picky)
    wrong = go(recipe, tmp_path / "out")
    assert wrong == ["mine FedAvg local_epochs=1 seed 0 and 1 more: training diverged"]
    assert len(trained) == 10


def test_a_mistake_of_all_trainings_is_told_once(
    recipe: Recipe, tmp_path: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").write_text(RECIPE.replace("num_clients: 4", "num_clients: -3"))
    with pytest.raises(SystemExit):
        main(["reproduce", "mine.yaml", "--out", "out"])
    told = capsys.readouterr()
    assert told.out == ""
    first, last = told.err.splitlines()
    assert first.startswith("mine Alone local_epochs=1 seed 0: num_clients must be at least 1, got -3")
    assert last.startswith("coterie: mine Alone local_epochs=1 seed 0 and 17 more: num_clients must be at least 1")


def test_data_that_are_not_there(tmp_path: Path) -> None:
    assert not is_available("cifar10", tmp_path)
    assert is_available("heart-disease", tmp_path)
    with pytest.raises(CoterieError, match=r"cifar10 was not found.*coterie data get cifar10"):
        go(find("P1-T2-CIFAR10"), tmp_path / "out", data_dir=str(tmp_path))
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made(recipe: Recipe, tmp_path: Path, trained: list[str]) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(CoterieError, match="cannot create the folder"):
        go(recipe, tmp_path / "out")
    assert trained == []


def test_a_disk_that_is_full(
    recipe: Recipe, tmp_path: Path, trained: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No part of a file is left, and nothing is trained that could not be kept."""

    def full(path: Path, text: str, encoding: str) -> int:
        path.write_bytes(text[:10].encode())
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(CoterieError, match=r"cannot write .*No space left on device.*the same command continues"):
        go(recipe, tmp_path / "out")
    assert list((tmp_path / "out" / "mine").iterdir()) == []
    assert len(trained) == 1


def test_what_is_not_trained_is_told(tmp_path: Path) -> None:
    with pytest.raises(CoterieError, match="coterie pictures"):
        go(find("P2-F4"), tmp_path / "out")


def test_choosing() -> None:
    recipe = find("P1-T1-CIFAR10-20")
    assert [row.name for row in chosen_rows(recipe, ["FEDPAC", "fedem", "local"])] == [
        "Local-only", "FedEM (M=3)", "FedEM (M=5)", "FedPAC",
    ]  # fmt: skip
    with pytest.raises(CoterieError, match="did you mean"):
        chosen_rows(recipe, ["fedpacc"])
    assert matches(recipe, ["cifar10", "table", "ditto"])
    assert not matches(recipe, ["cifar10", "gpfl"])
    with pytest.raises(CoterieError, match="seeds"):
        cells([(recipe, recipe.rows)], 0, None)


def coterie_command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "coterie", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=120, check=False)


def test_the_command(recipe: Recipe, tmp_path: Path) -> None:
    arguments = [
        "reproduce",
        "mine.yaml",
        "--seeds",
        "1",
        "--methods",
        "local",
        "fedavg",
        "--processes",
        "1",
        "--out",
        "o",
    ]
    done = coterie_command(*arguments, "--format", "csv", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "method,local_epochs,published,ours,std,±,difference,band,verdict,seeds,reading,read at"
    assert [line.split(",")[0] for line in lines[1:5]] == ["Alone", "Alone", "FedAvg", "FedAvg"]
    shown = coterie_command(*arguments, "--show", "--format", "csv", cwd=tmp_path)
    assert shown.stdout == done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["reproduce", "P9-T1"], "unknown recipe 'P9-T1'"),
        (["reproduce", "P2-F4"], "coterie pictures"),
        (["reproduce", "P1-T2-CIFAR10", "--data-dir", "nowhere"], "cifar10 was not found"),
        (["reproduce", "P1-T2-CIFAR10", "--rounds", "0"], "rounds must be at least 1"),
        (["reproduce", "P1-T2-FMNIST", "--backend", "loped"], "coterie: unknown backend 'loped': did you"),
        (["reproduce", "P1-T2-FMNIST", "--precision", "fp8"], "coterie: unknown precision 'fp8'"),
        (["reproduce", "P1-T2-FMNIST", "--device", "abacus"], "coterie: device 'abacus' cannot be used"),
        (["recipes", "fedpac", "tabular"], "no recipe contains 'fedpac tabular'"),
        (["compare", "local", "fedavg", "--against", "ditto"], "ditto is not among the methods that are compared"),
    ],
)
def test_bad_input_is_told_in_a_line(
    arguments: list[str], said: str, tmp_path: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert said in told.err
    assert list(tmp_path.iterdir()) == []


def test_the_list(tmp_path: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["recipes", "P1-T2", "--json", "--data-dir", str(tmp_path)])
    listed = json.loads(capsys.readouterr().out)
    assert [entry["id"] for entry in listed] == [f"P1-T2-{d}" for d in ("CIFAR10", "CINIC10", "EMNIST", "FMNIST")]
    assert (listed[0]["clients"], listed[0]["steps"], listed[0]["available"]) == ([20], 4 * 200 * 20 * 60, False)


def test_the_list_fits_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Words are not broken, and recipes are under the paper they are from."""
    monkeypatch.setattr(terminal, "console", Console(width=80))
    main(["recipes"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) == 80
    fields = {words[0]: words[1:] for words in (line.split() for line in lines) if words}
    assert fields.keys() >= {recipe.id for recipe in recipes()}
    assert fields["P1-T1-FMNIST-100"][:6] == ["Tables", "1", "fashion-mnist", "100", "23", "7.3M"]  # and 4: next line
    papers = [line for line in lines if line in {recipe.paper for recipe in recipes()}]
    assert papers == ["Replication of FedPAC, 2025", "FedPAC, ICLR 2023", "FedReG", "FedCRC", "PFAKD", "Coterie"]


def test_compare_tests_its_methods(tmp_path: Path) -> None:
    done = coterie_command(
        "compare", "local", "fedavg", "--num-clients", "4", "--local-size", "40", "--test-size", "20", "--rounds", "1",
        "--model", "linear", "--seeds", "2", "--processes", "1", "--against", "fedavg-ft", "--format", "markdown",
        "--out", "c", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "| method | accuracy | SD |" in done.stdout
    assert "| method | against FedAvg-FT | pairs | p | p (Holm) | at 5 % |" in done.stdout
    stored = json.loads((tmp_path / "c" / "compare.json").read_text())["outcomes"]
    tuned = [o for o in stored if o["method"] == "FedAvg-FT"]
    assert [len(o["scores"]) for o in tuned] == [4, 4]
    assert tuned[0]["mean"] == pytest.approx(sum(tuned[0]["scores"]) / 4)


def test_a_setting_that_is_new_does_not_make_old_results_useless() -> None:
    """But a changed one does, and so does a new one that is not as usual."""
    old = {"method": {"name": "FedAvg", "train": {"lr": 0.1}}, "rounds": 3}
    now = {"method": {"name": "FedAvg", "train": {"lr": 0.1, "clip_gradient": 0.0}}, "rounds": 3}
    usual = {"method": {"train": {"lr": 0.01, "clip_gradient": 0.0}}}
    assert covers(old, now, usual)
    assert not covers(old, {**now, "rounds": 4}, usual)
    assert not covers(old, {**now, "method": {"name": "FedAvg", "train": {"lr": 0.1, "clip_gradient": 1.0}}}, usual)
    assert not covers(now, old, usual)  # a setting that is gone
