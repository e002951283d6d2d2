"""The report against the numbers of the run folder, read here on their own; what is missing, damaged or hostile."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

import coterie
from coterie.api.comparing import load_comparison
from coterie.cli import main
from coterie.core.errors import CoterieError
from coterie.data import Partition
from coterie.report.page import report, write_report
from coterie.runs.checksums import FORMAT, Changed
from coterie.runs.finding import open_run, open_runs, run_folders
from coterie.runs.stored_run import StoredRun
from tests import toy
from tests.signing import sign

NASTY = '<script>alert(1)</script> & "q" \'é'
ROUNDS = 3


class Page(HTMLParser):
    """What a browser would find: elements with their attributes, and tables as text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.tables: list[list[list[str]]] = []
        self.text = ""
        self.inside: list[str] = []
        self.content: dict[str, str] = {"style": "", "script": "", "h1": "", "title": ""}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.inside.append(tag)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        while self.inside and self.inside.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        here = self.inside[-1] if self.inside else ""
        if here in self.content:
            self.content[here] += data
        if here in ("td", "th"):
            self.tables[-1][-1][-1] += data
        self.text += data

    def table(self, *columns: str) -> list[dict[str, str]]:
        """The first table that has these columns."""
        found = next(t for t in self.tables if set(columns) <= set(t[0]))
        return [dict(zip(found[0], row, strict=True)) for row in found[1:]]

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FedPAC and Ditto on the same ragged clients, 3 of 5 a round, with a validation split."""
    base = tmp_path_factory.mktemp("runs")
    data = replace(toy.toy(validation=(3, 4, 1, 5, 2)), class_names=("a", "b, c", NASTY, "d"))
    for name in ("fedpac", "ditto"):
        settings = {"rounds": ROUNDS, "join_ratio": 0.6, "full_last_round": True, "local_epochs": 1}
        coterie.run(name, data, toy.network(), backend=toy.IN_TURN, out=base / name, **settings)
    return base


@pytest.fixture
def copy(folders: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folders / "fedpac", tmp_path / "copy"))


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def read(folder: Path) -> StoredRun:
    """A run folder that a test may have edited."""
    return open_run(sign(folder))


def read_all(paths: Iterable[Path]) -> list[StoredRun]:
    paths = list(paths)
    for path in paths:
        for folder in run_folders(path):
            sign(folder)
    return open_runs(paths)


def page(*paths: Path) -> Page:
    return Page(report(read_all(paths)))


def test_the_last_full_round_is_told(folders: Path) -> None:
    """Curves have one round more than were asked for."""
    told = report(read_all([folders / "fedpac"]))
    assert f"{ROUNDS} rounds · 60 % of clients a round, all clients in one more round at the end" in told


def test_every_round_is_in_the_table(folders: Path) -> None:
    shown = page(folders / "fedpac").table("round", "PRE")
    written = rows(folders / "fedpac" / "metrics.csv")
    assert [r["round"] for r in shown] == [r["round"] for r in written] == ["1", "2", "3", "4"]
    sent = 0
    for ours, theirs in zip(shown, written, strict=True):
        for name, column in (("PRE", "pre"), ("POST", "post"), ("PRE (validation)", "validation_pre")):
            value = theirs[f"{column}_mean"]
            assert ours[name] == (f"{100 * float(value):.2f}" if value else "")
        sent += int(theirs["bytes_up"]) + int(theirs["bytes_down"])
        assert float(ours["MB so far"]) == pytest.approx(sent / 1e6, abs=6e-4)
        seconds = sum(float(v) for k, v in theirs.items() if k.startswith("seconds_") and v)
        assert float(ours["seconds"]) == pytest.approx(seconds, abs=6e-3)


def test_what_follows_the_last_round_counts_to_it(tmp_path: Path) -> None:
    """FedAvg ends with fine-tuning, a second line of the last round."""
    settings = {"rounds": 2, "local_epochs": 1}
    coterie.run("fedavg", toy.toy(), toy.network(), backend=toy.IN_TURN, out=tmp_path / "run", **settings)
    written = rows(tmp_path / "run" / "metrics.csv")
    assert [r["round"] for r in written] == ["1", "2", "2"]
    first, last = page(tmp_path / "run").table("round", "PRE", "finished")
    assert first["finished"] == ""
    assert last["PRE"] == f"{100 * float(written[1]['pre_mean']):.2f}"
    assert last["finished"] == f"{100 * float(written[2]['finished_mean']):.2f}"
    spent = [sum(float(v) for k, v in r.items() if k.startswith("seconds_") and v) for r in written]
    assert float(last["seconds"]) == pytest.approx(spent[1] + spent[2], abs=6e-3)
    assert float(last["MB up"]) == pytest.approx(int(written[1]["bytes_up"]) / 1e6, abs=6e-4)


def wilson(row: dict[str, str]) -> str:
    """The 95 % interval of a client's accuracy, from its line of clients.csv, by another library."""
    found = stats.binomtest(int(row["correct"]), int(row["total"])).proportion_ci(method="wilson")
    return f"{100 * found.low:.0f} to {100 * found.high:.0f}"


def test_the_page_says_how_many_the_worst_are(folders: Path, tmp_path: Path) -> None:
    text = (tmp_path / "one.html", tmp_path / "two.html")
    write_report([folders / "fedpac"], text[0])
    write_report([folders / "fedpac", folders / "ditto"], text[1])
    one, two = (path.read_text() for path in text)
    assert "mean of the worst 10 % of clients (1 client)" in one
    assert "Highlighted: the worst 10 % (1 client)" in one
    assert "worst 10 % (1 client)" in two
    assert "Mean accuracy of the 10 % (1 client) with the lowest accuracy" in two


def test_clients_and_fairness(folders: Path) -> None:
    """Sizes differ, so that by clients and by samples are not the same."""
    made = page(folders / "fedpac")
    last = [
        r
        for r in rows(folders / "fedpac" / "clients.csv")
        if (r["round"], r["point"], r["split"]) == ("3", "pre", "test")
    ]
    accuracies = {r["client"]: 100 * int(r["correct"]) / int(r["total"]) for r in last}
    shown = {r["client"]: r["FedPAC"] for r in made.table("client", "FedPAC")}
    assert shown == {
        r["client"]: f"{accuracies[r['client']]:.2f} ({r['correct']}/{r['total']}; {wilson(r)})" for r in last
    }
    told = {r[""]: r["PRE"] for r in made.table("", "PRE", "POST")}
    assert told["mean"] == f"{np.mean(list(accuracies.values())):.2f}"
    assert told["standard deviation"] == f"{np.std(list(accuracies.values())):.2f}"
    assert (
        told["worst 10 % (1 client)"] == told["lowest"] == f"{min(accuracies.values()):.2f}"
    )  # a tenth of five is one
    assert told["median"] == f"{np.median(list(accuracies.values())):.2f}"
    samples = sum(int(r["correct"]) for r in last) / sum(int(r["total"]) for r in last)
    assert told["by samples"] == f"{100 * samples:.2f}"
    assert told["clients"] == "5"


def test_runs_beside_each_other(folders: Path) -> None:
    made = page(folders / "fedpac", folders / "ditto")
    assert made.content["h1"] == "FedPAC and Ditto on toy"
    shown = {r["method"]: r for r in made.table("method", "accuracy", "seconds")}
    for name, method in (("fedpac", "FedPAC"), ("ditto", "Ditto")):
        result = json.loads((folders / name / "result.json").read_text())
        (outcome,) = result["outcomes"]
        assert shown[method]["accuracy"] == f"{100 * outcome['last']['mean']:.2f}"
        assert shown[method]["worst 10 % (1 client)"] == f"{100 * outcome['last']['worst10']:.2f}"
        assert shown[method]["SD clients"] == f"{100 * outcome['last']['std']:.2f}"
        sent = (result["bytes_up"] + result["bytes_down"]) / 1e6
        assert float(shown[method]["MB sent"]) == pytest.approx(sent, abs=6e-3)
        assert float(shown[method]["seconds"]) == pytest.approx(sum(result["seconds"].values()), abs=0.02)
    best, other = sorted(shown, key=lambda name: -float(shown[name]["accuracy"]))
    (test,) = made.table("method", f"against {best}", "p (Holm)")
    assert (test["method"], test["pairs"]) == (other, "5")
    assert "Wilcoxon" in made.text
    differ = {r["setting"]: r for r in made.table("setting", "FedPAC", "Ditto")}
    assert differ["method.name"]["Ditto"] == "Ditto"
    assert "data.name" not in differ  # that is the same


def test_a_folder_of_runs_stands_for_all_of_them(folders: Path) -> None:
    assert [run.title for run in read_all([folders])] == ["Ditto", "FedPAC"]


@pytest.mark.parametrize(
    ("named", "order", "against"),
    [("local fedavg", ["Local", "FedAvg", "FedAvg-FT"], ""),
     ("FedAvg-FT Local --against FedAvg-FT", ["FedAvg", "FedAvg-FT", "Local"], "FedAvg-FT"),
     ("local fedpac-fa fedpac --against fedpac-fa", ["Local", "FedPAC, combine False", "FedPAC, combine True"],
      "FedPAC, combine False")],
)  # fmt: skip
def test_a_comparison_is_shown_as_it_was_made(tmp_path: Path, named: str, order: list[str], against: str) -> None:
    """The order of its methods, and which of them the others are tested against."""
    out = tmp_path / "compared"
    main(["compare", *named.split(), "--dataset", "heart-disease", "--rounds", "1", "--out", str(out), "--json"])
    for given in (out, tmp_path):
        made = page(given)
        shown = made.table("method", "accuracy", "seconds")
        assert [r["method"] for r in shown] == order
        own = made.table("method", "accuracy, %", "AUROC, %")
        assert {(r["method"], r["accuracy, %"]) for r in own} <= {(r["method"], r["accuracy"]) for r in shown}
        tested = against or max(shown, key=lambda row: float(row["accuracy"]))["method"]
        tests = made.table("method", f"against {tested}", "p (Holm)")
        assert [r["method"] for r in tests] == [name for name in order if name != tested]
    rows = json.loads((out / "compare.json").read_text())["outcomes"]
    assert [r["accuracy"] for r in shown] == [f"{100 * row['mean']:.2f}" for row in rows]
    by_hand = page(*(run.folder for run in reversed(read_all([out]))))
    listed = by_hand.table("method", "accuracy", "seconds")
    best = max(listed, key=lambda row: float(row["accuracy"]))["method"]
    assert by_hand.table("method", f"against {best}", "p (Holm)")


def test_a_run_counts_once(folders: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folders / "fedpac")
    twice = [folders / "fedpac", folders, folders / "ditto" / ".." / "ditto", tmp_path / "link"]
    assert [run.title for run in read_all(twice)] == ["FedPAC", "Ditto"]


def test_runs_are_looked_for_a_few_levels_deep(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in runs, in links or in hidden folders, and never over a whole disk."""
    for place in ("b/c", "a", "a/inside", "b/.old/x", "b/c/../deep/1/2"):
        shutil.copytree(folders / "ditto", tmp_path / place)
    (tmp_path / "link").symlink_to(folders)
    (tmp_path / "b" / "round").symlink_to(tmp_path)
    assert [run.folder.relative_to(tmp_path).as_posix() for run in read_all([tmp_path])] == ["a", "b/c"]
    with pytest.raises(CoterieError, match=r"is not a run folder.* 3 levels"):
        read_all([tmp_path / "b" / "c" / "models"])
    monkeypatch.setattr("coterie.runs.finding.MOST_FOLDERS", 2)
    with pytest.raises(CoterieError, match="more than 2 folders that are not runs; name one"):
        read_all([tmp_path])


def test_seeds_are_one_method_and_settings_are_not(tmp_path: Path) -> None:
    """The first weights follow from the seed."""
    for name, change in (("first", {}), ("again", {"seed": 1}), ("longer", {"rounds": 2})):
        settings = {"rounds": 1, "local_epochs": 1, **change}
        coterie.run("fedpac", toy.toy(augmented=False), "mlp", backend=toy.IN_TURN, out=tmp_path / name, **settings)
    seeds = page(tmp_path / "first", tmp_path / "again")
    (line,) = seeds.table("method", "accuracy", "SD")
    assert line["method"] == "FedPAC"
    assert "±" in line["accuracy"]
    assert {"FedPAC, seed 0", "FedPAC, seed 1"} <= set(re.findall(r"FedPAC, seed \d", seeds.text))
    rounds = page(tmp_path / "first", tmp_path / "longer").table("method", "accuracy")
    assert [r["method"] for r in rounds] == ["FedPAC, rounds 1", "FedPAC, rounds 2"]


def test_only_reports_are_overwritten(folders: Path, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("<html>mine</html>")
    with pytest.raises(CoterieError, match=r"page\.html exists already and was not written by Coterie"):
        write_report([folders / "ditto"], path)
    assert path.read_text() == "<html>mine</html>"
    path.unlink()
    for _ in range(2):
        write_report([folders / "ditto"], path)


def test_metrics_of_seeds_are_a_mean_with_an_interval(tmp_path: Path) -> None:
    """Against evaluation.csv of both runs and Student's t of another library."""
    for seed in (0, 1):
        settings = {"rounds": 1, "local_epochs": 1, "seed": seed, "out": tmp_path / str(seed)}
        coterie.run("fedpac", toy.toy(augmented=False), "mlp", backend=toy.IN_TURN, **settings)
    evaluated = [rows(tmp_path / str(seed) / "evaluation.csv") for seed in (0, 1)]
    means = [
        np.mean([100 * float(r["calibration_error"]) for r in own if r["model"] == "personal"]) for own in evaluated
    ]
    half = stats.t.ppf(0.975, 1) * np.std(means, ddof=1) / np.sqrt(2)
    made = page(tmp_path / "0", tmp_path / "1")
    (line,) = made.table("method", "calibration error, %")
    assert line["calibration error, %"] == f"{np.mean(means):.2f} ± {half:.2f}"
    first = made.table("client", "calibration error, %")[0]["calibration error, %"]
    own = [100 * float(e[0]["calibration_error"]) for e in evaluated]
    assert first.split(" ± ")[0] == f"{np.mean(own):.2f}"


def test_fedavg_has_metrics_of_its_global_model(tmp_path: Path) -> None:
    """FedAvg reports the global model, FedAvg-FT the fine-tuned ones; both are measured."""
    settings = {"rounds": 1, "local_epochs": 3, "lr": 0.5, "backend": toy.IN_TURN, "out": tmp_path / "run"}
    coterie.run("fedavg", toy.toy(augmented=False), "mlp", **settings)
    evaluated = rows(tmp_path / "run" / "evaluation.csv")
    at_end = {(r["point"], r["client"]): r["accuracy"] for r in rows(tmp_path / "run" / "clients.csv")}
    named = {"FedAvg": ("global", "pre"), "FedAvg-FT": ("personal", "finished")}
    made = page(tmp_path / "run")
    shown = {r["method"]: r for r in made.table("method", "AUROC, %")}
    assert shown.keys() == named.keys()
    assert shown["FedAvg"] != shown["FedAvg-FT"] | {"method": "FedAvg"}
    compared = load_comparison(tmp_path / "run")
    (at, *_), *cells = csv.reader(compared.to_csv(["auroc", "calibration_error"]).splitlines())
    assert at == "method"
    for (title, (model, point)), cell in zip(named.items(), cells, strict=True):
        own = [r for r in evaluated if r["model"] == model]
        assert all(float(r["accuracy"]) == float(at_end[point, r["client"]]) for r in own if r["accuracy"])
        for metric, name, column in (("auroc", "AUROC, %", 1), ("calibration_error", "calibration error, %", 2)):
            mean = f"{np.mean([100 * float(r[metric]) for r in own if r[metric]]):.2f}"
            assert shown[title][name] == cell[column] == mean
    with pytest.raises(CoterieError, match="unknown column 'aurc': did you mean 'auroc'"):
        compared.publication(["aurc"])


def test_confusion_matrices_are_those_of_the_clients(folders: Path) -> None:
    """Their sum is that of the run, their diagonals are the clients' accuracies; F1 and accuracy of classes follow."""
    cells = [{name: int(v) for name, v in row.items()} for row in rows(folders / "fedpac" / "confusion.csv")]
    whole = np.zeros((4, 4), int)
    for cell in cells:
        whole[cell["label"], cell["prediction"]] += cell["samples"]
    assert whole.tolist() == json.loads((folders / "fedpac" / "result.json").read_text())["confusion"]
    for client, told in enumerate(rows(folders / "fedpac" / "evaluation.csv")[:5]):
        own = [c for c in cells if c["client"] == client]
        right = sum(c["samples"] for c in own if c["label"] == c["prediction"])
        assert right / sum(c["samples"] for c in own) == pytest.approx(float(told["accuracy"]), abs=1e-6)
    made = page(folders / "fedpac")
    (viewer,) = (e for e in made.all("div") if "data-confusion" in e)
    (method,) = json.loads(viewer["data-confusion"] or "")["methods"]
    assert [name for name, _ in method["clients"]] == ["all clients", "0", "1", "2", "3", "4"]
    assert method["clients"][3][1] == [n for c in cells if c["client"] == 2 for n in list(c.values())[1:]]
    recall = {r["class"]: r["FedPAC"] for r in made.table("class", "FedPAC")}
    assert [recall[name] for name in ("a", "d")] == [f"{100 * whole[k, k] / whole[k].sum():.2f}" for k in (0, 3)]


@pytest.mark.long
def test_seeds_with_partitions_of_their_own_are_one_method(tmp_path: Path) -> None:
    """Client 0 of one partition is not client 0 of another, so there is no table of clients."""
    for seed in (0, 1):
        data = coterie.load_clients(num_clients=3, local_size=20, test_size=10, partition_seed="vary", seed=seed)
        coterie.run("local", data, "linear", rounds=1, seed=seed, out=tmp_path / str(seed), progress=False)
    made = page(tmp_path / "0", tmp_path / "1")
    (line,) = made.table("method", "accuracy", "SD")
    assert line["method"] == "Local"
    assert "Accuracy of every client" not in [t[0][0] for t in made.tables]
    assert not [t for t in made.tables if t[0] == ["client", "Local"]]


def test_other_first_weights_with_the_same_seed_are_told_apart(tmp_path: Path) -> None:
    runs = [(weights, seed) for weights in (0, 1) for seed in (0, 1)]
    for weights, seed in runs:
        settings = {"rounds": 1, "local_epochs": 1, "seed": seed, "out": tmp_path / f"{weights}-{seed}"}
        coterie.run("fedpac", toy.toy(), toy.network(seed=weights), backend=toy.IN_TURN, **settings)
    starts = [read(tmp_path / f"{w}-{seed}").config["model"]["start"] for w, seed in runs if seed == 0]
    shown = page(tmp_path).table("method", "accuracy", "SD")
    assert [r["method"] for r in shown] == [f"FedPAC, start {start[:7]}" for start in starts]


def test_runs_on_different_data_are_not_tested_against_each_other(folders: Path, copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    config["data"]["train_sizes"][0] += 1
    (copy / "config.json").write_text(json.dumps(config))
    assert "Wilcoxon" not in page(folders / "ditto", copy).text


def test_head_weights_are_those_of_the_file(folders: Path) -> None:
    """By client: the report may order them anew. A byte keeps the root of the share."""
    (figure,) = (f for f in page(folders / "fedpac").all("figure") if "data-heat" in f)
    shown = json.loads(figure["data-heat"] or "")
    participants = {
        number: [int(r["client"]) for r in rows(folders / "fedpac" / "clients.csv")
                 if (r["round"], r["point"], r["split"]) == (str(number), "post", "test")]
        for number in (1, 2, 3)
    }  # fmt: skip
    assert [r["round"] for r in shown] == [1, 2, 3]
    with np.load(folders / "fedpac" / "reports.npz") as file:
        for r in shown:
            weights, ids = file[f"head_weights/{r['round']:05}"], participants[r["round"]]
            cells = np.frombuffer(base64.b64decode(r["cells"]), np.uint8).reshape(3, 3)
            for i, row in enumerate(r["clients"]):
                for j, column in enumerate(r["clients"]):
                    exact = weights[ids.index(int(row)), ids.index(int(column))]
                    assert (cells[i, j] / 255) ** 2 == pytest.approx(exact, abs=0.004)


def test_clients_of_one_group_stand_together(copy: Path) -> None:
    parts = tuple(np.array([i]) for i in range(5))
    Partition("by hand", parts, parts, groups=(1, 0, 1, 0, 1)).save(copy / "partition.npz")
    matrix = np.arange(25).reshape(5, 5) / 24
    np.savez(copy / "reports.npz", **{"head_weights/00009": matrix})  # not measured, so all five took part
    (weights,) = read(copy).head_weights
    assert weights.clients == (1, 3, 0, 2, 4)
    assert weights.matrix[0].tolist() == [matrix[1, j] for j in (1, 3, 0, 2, 4)]
    assert weights.matrix[2].tolist() == [matrix[0, j] for j in (1, 3, 0, 2, 4)]


def test_classes(folders: Path) -> None:
    labels = toy.toy().train
    shown = page(folders / "fedpac").table("client", "a", "b, c", NASTY, "d")
    for i, own in enumerate(shown):
        counts = np.bincount(labels.client(i)[1].numpy(), minlength=4)
        assert [own[name] for name in ("a", "b, c", NASTY, "d")] == [str(n) for n in counts]


def test_a_run_that_was_stopped_is_told_as_far_as_it_went(copy: Path) -> None:
    for name in ("result.json", "reports.npz"):
        (copy / name).unlink()
    lines = (copy / "metrics.csv").read_bytes().splitlines(keepends=True)
    (copy / "metrics.csv").write_bytes(b"".join(lines[:3]) + lines[3][:40])  # killed while it wrote round 3
    made = page(copy)
    assert f"stopped after round 2 of {ROUNDS}" in made.text
    assert [r["round"] for r in made.table("round", "PRE")] == ["1", "2"]
    assert not [f for f in made.all("figure") if "data-heat" in f]


def test_a_run_without_a_round(copy: Path) -> None:
    for name in ("result.json", "reports.npz"):
        (copy / name).unlink()
    for name in ("metrics.csv", "clients.csv"):
        (copy / name).write_bytes((copy / name).read_bytes().splitlines(keepends=True)[0])
    assert "before its first round ended" in page(copy).text


FILES = (
    "config.json",
    "metrics.csv",
    "clients.csv",
    "classes.csv",
    "partition.svg",
    "reports.npz",
    "result.json",
    "log.txt",
)


@pytest.mark.parametrize("name", FILES)
def test_any_file_may_be_missing(copy: Path, name: str) -> None:
    """Of a run that was stopped; a finished one is refused without what every finished run has."""
    (copy / name).unlink()
    if name in ("config.json", "metrics.csv", "clients.csv"):
        with pytest.raises(Changed, match=rf"{name} is missing"):
            page(copy)
    (copy / "result.json").unlink(missing_ok=True)
    made = page(copy)
    if name not in ("reports.npz", "result.json", "log.txt"):  # those that not every run has
        assert f"{name} is missing" in made.text
    assert made.content["h1"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00junk", b"[1, 2]", b"round,client\nx,y\n", b"PK\x03\x04broken"])
def test_any_file_may_be_damaged(copy: Path, folders: Path, name: str, content: bytes) -> None:
    (copy / name).write_bytes(content)
    assert page(copy).content["h1"]
    assert page(folders / "ditto", copy).content["h1"]


def cut(path: Path, lines: int, more: int = 0) -> None:
    """Leave so many lines, and so many bytes of the next."""
    content = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(content[:lines]) + content[lines][:more])


def test_whole_folders_lack_nothing(folders: Path) -> None:
    assert "incomplete folder" not in page(folders).text


@pytest.mark.parametrize("more", [0, 6, -2])  # at the end of a line, inside a number, before the end of the line
def test_metrics_that_were_cut_are_told(copy: Path, more: int) -> None:
    """A line that is not whole is not shown: its last number may be half of one."""
    cut(copy / "metrics.csv", 2, more)
    made = page(copy)
    assert "has an incomplete folder: metrics.csv ends after round 1 of 4." in made.text
    assert [r["round"] for r in made.table("round", "PRE")] == ["1"]


@pytest.mark.parametrize("more", [0, 3, -2])
def test_classes_that_were_cut_are_told(copy: Path, more: int) -> None:
    cut(copy / "classes.csv", 3, more)
    made = page(copy)
    assert "has an incomplete folder: classes.csv has 2 of 5 clients." in made.text
    assert [r["client"] for r in made.table("client", "a", "d")] == ["0", "1"]


@pytest.mark.parametrize("result", [True, False])
@pytest.mark.parametrize("more", [0, 3, -2])
def test_clients_that_were_cut_are_told(copy: Path, more: int, result: bool) -> None:
    """POST of everybody, in the round that follows, comes last."""
    if not result:
        (copy / "result.json").unlink()
    places = [(r["round"], r["point"], r["split"]) for r in rows(copy / "clients.csv")]
    post, pre = (max(i for i, at in enumerate(places) if at == (*one, "test")) for one in (("4", "post"), ("3", "pre")))
    for lines, number in ((1 + post, 4), (1 + pre, 3), (pre - 1, 3)):  # the first line is the header
        cut(copy / "clients.csv", lines, more)
        assert f"clients.csv does not have all clients of round {number}" in page(copy).text
    assert {r["client"] for r in page(copy).table("client", "FedPAC")} == {"0", "1"}


def test_clients_that_were_cut_are_told_if_all_fare_alike(tmp_path: Path) -> None:
    """Their mean is that of the others."""
    data = toy.toy(test=(1,) * 5)
    data.test.x[:], data.test.y[:] = data.test.x[:1].clone(), data.test.y[:1].clone()
    out = tmp_path / "run"
    coterie.run("fedavg", data, toy.network(), backend=toy.IN_TURN, out=out, rounds=1, local_epochs=1, lr=1e-9)
    assert "incomplete folder" not in page(out).text
    cut(out / "clients.csv", len(rows(out / "clients.csv")))
    assert "clients.csv does not have all clients of round 1" in page(out).text


def test_fine_tuning_that_was_cut_is_told(tmp_path: Path) -> None:
    """It is a second line of the last round."""
    coterie.run("fedavg", toy.toy(), toy.network(), backend=toy.IN_TURN, out=tmp_path / "run", rounds=1, local_epochs=1)
    assert "incomplete folder" not in page(tmp_path / "run").text
    cut(tmp_path / "run" / "metrics.csv", 2)
    assert "metrics.csv lacks the measurements after the last round" in page(tmp_path / "run").text


@pytest.mark.parametrize("content", [None, b'{"data": {'])
def test_a_lost_configuration_is_all_that_is_told(copy: Path, content: bytes | None) -> None:
    """The other files are whole."""
    (copy / "config.json").unlink()
    (copy / "result.json").unlink()  # a finished run is refused
    if content:
        (copy / "config.json").write_bytes(content)
    (note,) = re.findall(r"incomplete folder: .*", page(copy).text)
    assert "config.json" in note
    assert "reports.npz" not in note
    assert "csv" not in note


def test_metrics_may_have_few_columns_and_odd_values(copy: Path, folders: Path) -> None:
    (copy / "metrics.csv").write_text("round,pre_mean\n1,5\n2,inf\n3,-7\n")
    assert [r["PRE"] for r in page(copy).table("round", "PRE")] == ["500.00", "", "-700.00"]
    assert page(folders / "ditto", copy).content["h1"]


@pytest.mark.parametrize(
    "config",
    [
        {"method": 3},
        {"data": [1]},
        {"data": {"partition": 1, "clients": "x"}},
        {"federation": {"rounds": "x", "seed": None}},
    ],
)
def test_a_configuration_may_say_anything(copy: Path, folders: Path, config: dict[str, Any]) -> None:
    (copy / "config.json").write_text(json.dumps({"format": FORMAT, **config}))
    assert page(copy).content["h1"]
    assert page(folders / "ditto", copy).content["h1"]


@pytest.mark.parametrize("outcomes", [3, [1], [{}], [{"name": 1, "measured": [], "best_by_validation": "x"}], None])
def test_a_result_may_say_anything(copy: Path, folders: Path, outcomes: Any) -> None:
    (copy / "result.json").write_text(json.dumps({"outcomes": outcomes}))
    assert page(copy).content["h1"].startswith("FedPAC")
    assert page(folders / "ditto", copy).content["h1"]


def test_a_method_that_reports_only_at_its_end_is_told_before_it(copy: Path, folders: Path) -> None:
    """FedBABU reports what fine-tuning gives; until then there is PRE."""
    (copy / "result.json").unlink()
    config = json.loads((copy / "config.json").read_text())
    config["method"] |= {"name": "FedBABU", "class": "fedbabu"}
    (copy / "config.json").write_text(json.dumps(config))
    shown = page(folders / "ditto", copy).table("method", "accuracy")
    assert [r["method"] for r in shown] == ["Ditto", "FedBABU (pre)"]


def test_too_many_clients_for_a_heat_map(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    config["data"]["clients"] = 300
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "clients.csv").unlink()
    (copy / "result.json").unlink()
    np.savez(copy / "reports.npz", **{"head_weights/00001": np.eye(300)})
    made = page(copy)
    assert "clients are not drawn" in made.text
    assert not [f for f in made.all("figure") if "data-heat" in f]


def test_nothing_of_a_folder_becomes_markup(folders: Path, tmp_path: Path) -> None:
    hostile = Path(shutil.copytree(folders / "fedpac", tmp_path / NASTY.replace("/", "|")))
    config = json.loads((hostile / "config.json").read_text())
    config["method"] |= {"name": NASTY, NASTY: NASTY}
    config["data"]["name"] = config["ran"]["machine"] = NASTY
    (hostile / "config.json").write_text(json.dumps(config), encoding="utf-8")
    result = json.loads((hostile / "result.json").read_text())
    result["outcomes"][0]["name"] = NASTY
    (hostile / "result.json").write_text(json.dumps(result), encoding="utf-8")
    (hostile / "log.txt").write_text(NASTY, encoding="utf-8")
    (hostile / "partition.svg").write_text(f'<svg xmlns="http://www.w3.org/2000/svg" onload="alert(1)">{NASTY}"</svg>')
    made = page(hostile, folders / "ditto")
    assert len(made.all("script")) == 1
    assert "alert(1)" not in made.content["script"]
    assert made.content["h1"] == f"{NASTY} and Ditto on {NASTY} and toy"
    assert made.content["title"].startswith(NASTY)
    assert not [a for _, attributes in made.elements for a in attributes if a.startswith("on") or a == "style"]


def test_only_its_own_style_and_script_may_act(folders: Path) -> None:
    made = page(folders / "fedpac")
    policy = next(m["content"] for m in made.all("meta") if m.get("http-equiv") == "Content-Security-Policy") or ""
    for kind in ("style", "script"):
        digest = base64.b64encode(hashlib.sha256(made.content[kind].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    for _, attributes in made.elements:
        for name in ("src", "href"):
            assert (attributes.get(name) or "#").startswith(("#", "data:"))


def test_the_page_is_well_formed_for_readers(folders: Path) -> None:
    made = page(folders / "fedpac", folders / "ditto")
    names = [name for name, _ in made.elements]
    assert names.count("h1") == 1
    assert names.count("figure") == names.count("figcaption") > 5
    assert all(cell.get("scope") in ("row", "col") for cell in made.all("th"))
    pictures = [i for i, (name, a) in enumerate(made.elements) if name == "svg" and a.get("role") == "img"]
    assert all(names[i + 1 : i + 3] == ["title", "desc"] for i in pictures)
    ids = [a["id"] for _, a in made.elements if "id" in a]
    assert len(ids) == len(set(ids))
    assert {(a["href"] or "")[1:] for a in made.all("a")} <= set(ids)


def luminance(colour: str) -> float:
    """Relative luminance of #rrggbb, as WCAG 2 has it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_colours_have_contrast_in_light_and_dark(folders: Path) -> None:
    style = page(folders / "fedpac").content["style"]
    light, dark = (dict(re.findall(r"--([\w-]+): (#\w{6});", block)) for block in style.split("@media", 2)[:2])
    for colours in (light, dark):
        for name, least in [("ink", 7), ("soft", 4.5), ("accent", 4.5), *((f"s{i}", 3) for i in range(8))]:
            for ground in ("paper", "card"):
                low, high = sorted((luminance(colours[name]), luminance(colours[ground])))
                assert (high + 0.05) / (low + 0.05) >= least, (name, ground)


def test_200_rounds_of_100_clients_are_below_a_megabyte(folders: Path, copy: Path) -> None:
    """The worst that FedPAC gives: everyone takes part, and no weight is like its neighbour."""
    config = json.loads((copy / "config.json").read_text())
    config["data"]["clients"] = 100
    (copy / "config.json").write_text(json.dumps(config))
    header, first = (copy / "metrics.csv").read_text().splitlines()[:2]
    lines = [f"{number},{first.split(',', 1)[1]}" for number in range(1, 201)]
    (copy / "metrics.csv").write_text("\n".join([header, *lines]) + "\n")
    scores = [
        f"{r},{c},{p},test,{c},100,0.{c:02},0.5" for r in range(1, 201) for p in ("post", "pre") for c in range(100)
    ]
    (copy / "clients.csv").write_text(
        "\n".join(["round,client,point,split,correct,total,accuracy,loss", *scores]) + "\n"
    )
    draw = np.random.default_rng(0)
    np.savez(copy / "reports.npz", **{f"head_weights/{r:05}": draw.dirichlet(np.ones(100), 100) for r in range(1, 201)})
    counts = [",".join(map(str, [c, *draw.integers(0, 60, 10)])) for c in range(100)]
    (copy / "classes.csv").write_text("\n".join(["client,0,1,2,3,4,5,6,7,8,9", *counts]) + "\n")
    circles = "".join(
        f'<circle cx="{i}" cy="2.5" r="3.25"><title>client {i}, a: 20</title></circle>' for i in range(1000)
    )
    (copy / "partition.svg").write_text(f'<svg xmlns="http://www.w3.org/2000/svg">{circles}</svg>')
    text = report([read(copy)])
    assert len(text.encode()) < 1_000_000
    (figure,) = (f for f in Page(text).all("figure") if "data-heat" in f)
    shown = [r["round"] for r in json.loads(figure["data-heat"] or "")]
    assert (shown[0], shown[-1]) == (1, 200)
    assert f"{len(shown)} of 200 rounds" in text


def test_the_command_writes_the_whole_file_or_none(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a b é.html"
    main(["report", str(folders / "fedpac"), "--out", str(out)])
    assert capsys.readouterr().out.strip() == str(out)
    assert out.read_text(encoding="utf-8").endswith("</html>\n")
    assert os.listdir(tmp_path) == [out.name]


@pytest.mark.parametrize(
    ("path", "out", "said"),
    [("nowhere", "r.html", "no such folder"), ("file", "r.html", "is a file"), ("empty", "r.html", "no config.json"),
     ("run", "no/r.html", "cannot be written"), ("run", "empty", "cannot be written")],
)  # fmt: skip
def test_what_cannot_be_done_is_said(folders: Path, tmp_path: Path, path: str, out: str, said: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "run").symlink_to(folders / "ditto")
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(CoterieError, match=said):
        write_report([tmp_path / path], tmp_path / out)
    assert sorted(os.listdir(tmp_path)) == before
