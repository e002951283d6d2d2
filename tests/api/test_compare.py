"""coterie.compare, coterie.load_comparison and `coterie table`."""

from __future__ import annotations

import csv
import dataclasses
import errno
import html.parser
import io
import itertools
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

import coterie
from coterie.cli import main
from coterie.core.errors import CoterieError
from coterie.methods import METHODS
from tests import toy
from tests.api.test_run import Interrupter

HERE = coterie.Execution(backend="looped", device="cpu", processes=1)
HOW: dict[str, Any] = {"rounds": 2, "backend": HERE, "evaluate_every": 2}


def data() -> coterie.FederatedData:
    return coterie.load_clients(num_clients=4, local_size=40, test_size=20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("compare") / "runs"
    coterie.compare(["local", "fedavg"], data(), "linear", seeds=2, out=out, **HOW)
    return out


def test_a_comparison_is_that_of_its_runs() -> None:
    found = coterie.compare(["local", coterie.FedPer()], toy.toy(), toy.network(), seeds=2, seed=5, **HOW)
    assert found.methods == ["Local", "FedPer"]
    runs = {
        name: [coterie.run(name, toy.toy(), toy.network(), seed=seed, **HOW) for seed in (5, 6)]
        for name in ("local", "fedper")
    }
    means = {name: [100 * r.outcomes()[0].last.mean for r in group] for name, group in runs.items()}
    table = found.table().set_index("method")
    for title, name in (("Local", "local"), ("FedPer", "fedper")):
        assert table.loc[title, "accuracy"] == pytest.approx(sum(means[name]) / 2)
        half = stats.t.ppf(0.975, df=1) * stats.sem(means[name])
        assert table.loc[title, "accuracy ±"] == pytest.approx(half, abs=1e-9)
    tests = found.significance()
    best, other = table.sort_values("accuracy", ascending=False, kind="stable").index
    assert tests["method"].tolist() == [other]
    assert tests["difference"].item() == pytest.approx(table.loc[other, "accuracy"] - table.loc[best, "accuracy"])
    assert found.significance(against=other)["method"].tolist() == [best]
    assert repr(found).startswith("Comparison on toy, ")
    assert "<table>" in found._repr_html_()


def test_the_command_uses_the_same_code(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(
        ["compare", "local", "fedavg", "-nc", "4", "--local-size", "40", "--test-size", "20", "--model", "linear",
         "--rounds", "2", "--evaluate-every", "2", "--seeds", "2", "--processes", "1", "--backend", "looped",
         "--device", "cpu", "--out", str(tmp_path / "c"), "--json"]
    )  # fmt: skip
    table = json.loads(capsys.readouterr().out)
    ours = json.loads((folder / "compare.json").read_text())
    for rows in (table["outcomes"], ours["outcomes"]):
        for row in rows:
            row.pop("seconds")
    assert table["outcomes"] == ours["outcomes"]


def test_every_metric_is_a_column(folder: Path) -> None:
    """The mean over clients in evaluation.csv, and over seeds; the same from memory, from runs and in compare.json."""
    made = coterie.compare(["local", "fedavg"], data(), "linear", seeds=2, out=folder, exist="resume", **HOW)
    loaded, columns = coterie.load_comparison(folder), ["accuracy", "auroc", "calibration_error"]
    assert sorted(made.to_csv(columns).splitlines()) == sorted(loaded.to_csv(columns).splitlines())
    found = []
    for seed in range(2):
        with (folder / f"fedavg-seed{seed}" / "evaluation.csv").open() as file:
            own = [float(r["auroc"]) for r in csv.DictReader(file) if r["model"] == "global" and r["auroc"]]
        found.append(100 * sum(own) / len(own))
    assert made.table().set_index("method").loc["FedAvg", "auroc"] == pytest.approx(sum(found) / 2, abs=1e-4)
    stored = json.loads((folder / "compare.json").read_text())["outcomes"]
    of_fedavg = [100 * row["metrics"]["auroc"] for row in stored if row["method"] == "FedAvg"]
    assert of_fedavg == pytest.approx(found, abs=1e-4)


def test_progress_is_shown_whatever_the_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(
        ["compare", "local", "-nc", "3", "--local-size", "30", "--test-size", "10", "--model", "linear",
         "--rounds", "1",
         "--processes", "1", "--out", str(tmp_path / "c"), "--format", "latex"]
    )  # fmt: skip
    told = capsys.readouterr()
    assert "Local  round 1/1" in told.err
    assert told.out.startswith("\\begin{table}")
    assert told.out.endswith("\\end{table}\n")
    main(["table", str(tmp_path / "c"), "--format", "latex"])
    shown = capsys.readouterr().out
    main(["table", str(tmp_path / "c"), "--out", str(tmp_path / "table.tex")])
    assert (tmp_path / "table.tex").read_text(encoding="utf-8") == shown
    assert capsys.readouterr().out == f"{tmp_path / 'table.tex'}\n"


def test_names_of_ones_own_and_two_of_one_kind() -> None:
    weak, strong = coterie.FedPAC(align=0.1), coterie.FedPAC(align=10.0)
    found = coterie.compare({"weak": weak, "strong": strong}, toy.toy(), toy.network(), seeds=1, **HOW)
    assert found.methods == ["weak", "strong"]
    with pytest.raises(CoterieError, match=r"two methods are called FedPAC: give them names"):
        coterie.compare([weak, strong], toy.toy(), toy.network(), seeds=1, **HOW)


@pytest.mark.parametrize(
    ("methods", "settings", "said"),
    [
        ([], {}, "methods must be a list"),
        ("fedavg", {}, "methods must be a list"),
        (["fedpca"], {}, "did you mean 'fedpac'"),
        (["fedavg"], {"seeds": 0}, "seeds must be at least 1"),
        (["fedavg"], {"against": "fedper"}, "fedper is not among the methods that are compared"),
        (["fedavg", "fedpac"], {"dp": "client"}, "FedPAC does not support --dp client"),
        (["fedavg"], {"align": 1.0}, "not of FedAvg"),
        (["fedavg"], {"settings": coterie.Settings(), "rounds": 2}, "rounds is given by name"),
    ],
)
def test_wrong_comparisons(methods: Any, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(CoterieError) as error:
        coterie.compare(methods, toy.toy(), toy.network(), **{"seeds": 1, **settings})
    assert said in str(error.value)


def test_all_leaves_out_what_refuses_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {name: METHODS[name] for name in ("fedavg", "fedbn", "local")}
    monkeypatch.setattr("coterie.api.entrants.METHODS", chosen)
    settings: Any = {"rounds": 1, "seeds": 2, "progress": False}
    found = coterie.compare(["all"], toy.toy(), toy.network(), out=tmp_path / "all", **settings)
    assert found.methods == ["Local", "FedAvg", "FedAvg-FT"]
    assert found.against is None
    refused = json.loads((tmp_path / "all" / "compare.json").read_text())["refused"]
    assert list(refused) == ["FedBN"]
    assert refused["FedBN"].startswith("FedBN needs normalization layers")
    with pytest.raises(CoterieError, match="FedBN needs normalization layers"):  # named, it is an error
        coterie.compare(["fedbn"], toy.toy(), toy.network(), **settings)
    with pytest.raises(CoterieError, match="cannot be combined"):
        coterie.compare(["all", "fedavg"], toy.toy(), toy.network(), **settings)


def test_a_partition_for_every_seed() -> None:
    drawn: list[int] = []

    def make(seed: int) -> coterie.FederatedData:
        drawn.append(seed)
        return coterie.load_clients(num_clients=3, local_size=30, test_size=10, partition_seed="vary", seed=seed)

    found = coterie.compare(["local", "fedavg"], make, "linear", seeds=2, **HOW)
    assert set(drawn) == {0, 1}
    assert len({row["content"] for row in found.outcomes}) == 2
    assert found.significance()["pairs"].tolist() == [2, 2]  # partitions, not clients


@pytest.mark.parametrize(("at", "finished"), [(4, ["Local"]), (5, ["Local", "FedPer"])])
def test_an_interrupted_comparison_has_the_finished_runs(
    at: int, finished: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Three rounds each. In round 1 of the second run, which then ends early; in round 2, and it is complete."""
    calls = 0

    def press(record: coterie.Round) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            Interrupter(record.number)(record)

    found = coterie.compare(
        ["local", "fedper", "fedavg"], toy.toy(), toy.network(), seeds=1, watch=press, **HOW | {"rounds": 3}
    )
    assert found.methods == finished
    assert f"the comparison has {len(finished)} of 3 runs" in caplog.text
    assert "the result has" not in caplog.text  # that of a run which is not kept


def test_a_comparison_that_is_interrupted_in_its_first_run(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(KeyboardInterrupt):
        coterie.compare(
            ["local", "fedper"], toy.toy(), toy.network(), seeds=1, watch=Interrupter(1), **HOW | {"rounds": 3}
        )
    assert "interrupted: none of the 2 runs was finished, so nothing is kept" in caplog.text
    assert "the result has" not in caplog.text


def test_an_interrupted_comparison_in_a_folder_names_that_folder(tmp_path: Path) -> None:
    out = tmp_path / "c"
    with pytest.raises(KeyboardInterrupt, match=rf"; the same call with out='{out}' and exist='resume' continues it$"):
        coterie.compare(["local", "fedper"], toy.toy(), toy.network(), seeds=1, out=out, watch=Interrupter(1), **HOW)
    again = coterie.compare(["local", "fedper"], toy.toy(), toy.network(), seeds=1, out=out, exist="resume", **HOW)
    assert again.methods == ["Local", "FedPer"]


def test_finished_runs_are_not_run_again(folder: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*/result.json")}
    assert len(before) == 4
    again = coterie.compare(["local", "fedavg", "fedper"], data(), "linear", seeds=2, out=folder, exist="resume", **HOW)
    assert before == {path: path.stat().st_mtime_ns for path in before}
    assert again.methods == ["Local", "FedAvg", "FedAvg-FT", "FedPer"]
    with pytest.raises(CoterieError, match="exists already"):
        coterie.compare(["local"], data(), "linear", seeds=1, out=folder, **HOW)


# The table of a paper.


@pytest.fixture(scope="module")
def found(folder: Path) -> coterie.Comparison:
    return coterie.load_comparison(folder / "local-seed0", folder / "local-seed1", *folder.glob("fedavg-*"))


def test_a_comparison_from_folders_has_the_same_numbers(folder: Path, found: coterie.Comparison) -> None:
    rows = json.loads((folder / "compare.json").read_text())["outcomes"]
    table = found.table().set_index("method")
    for method in ("Local", "FedAvg", "FedAvg-FT"):
        means = [100 * row["mean"] for row in rows if row["method"] == method]
        assert table.loc[method, "accuracy"] == pytest.approx(sum(means) / 2, abs=1e-3)
    assert found.curves["FedAvg"][0][-1][0] == 2


def table_of(folder: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    main(["table", *map(str, sorted(folder.glob("local-*")) + sorted(folder.glob("fedavg-*"))), *flags])
    return capsys.readouterr().out


def test_the_best_is_bold_and_differences_are_marked() -> None:
    """By hand: 20 clients, B better than A by a point on each, C the same as B but for noise without a sign."""
    base = [0.5 + 0.01 * i for i in range(20)]
    accuracies = {
        "A": base,
        "B": [a + 0.01 + 1e-4 * i + 2e-5 * (i == 19) for i, a in enumerate(base)],
        "C": [a + 0.01 + 1e-4 * i + (-1) ** i * 1e-5 * (1 + i // 2) for i, a in enumerate(base)],
    }
    rows = [
        {"method": name, "seed": 0, "mean": math.fsum(own) / 20, "worst10": min(own), "megabytes": len(name),
         "content": "d", "clients": [*range(20)], "scores": own}
        for name, own in accuracies.items()
    ]  # fmt: skip
    table = coterie.Comparison(rows, "toy", 20).publication(["accuracy", "worst10"], against="B")
    assert [row[1:] for row in table.rows] == [["59.50†", "50.00"], ["60.60", "51.00"], ["60.59", "51.00"]]
    assert table.bold == {(1, 1), (1, 2), (2, 2)}  # the worst tenth of B and C are equal as shown
    assert "†: differs from B at 5 % (corrected by Holm)" in table.note
    assert "seeds" not in table.note.split("†")[0]  # one run each: no interval
    assert "No method" not in table.note


def by_seed(means: dict[str, list[float]]) -> coterie.Comparison:
    """Methods with two clients, the second 10 points better, and these means for each seed."""
    rows = [
        {"method": name, "seed": seed, "mean": mean, "worst10": mean - 0.05, "megabytes": 1.0, "content": "d",
         "clients": [0, 1], "scores": [mean - 0.05, mean + 0.05]}
        for name, own in means.items() for seed, mean in enumerate(own)
    ]  # fmt: skip
    return coterie.Comparison(rows, "toy", 2)


def test_plus_minus_means_the_interval_everywhere() -> None:
    """0.58, 0.61 and 0.64: standard deviation 3 points, interval 4.3027 · 3 / √3."""
    found = by_seed({"A": [0.58, 0.61, 0.64], "B": [0.5, 0.5, 0.5]})
    assert "  A: 61.00 ± 7.45 %\n" in repr(found)
    scores, _ = found.text_tables()
    assert dict(zip(scores.header, scores.rows[0], strict=True)) == {
        "method": "A", "accuracy": "61.00 ± 7.45", "SD": "3.00", "worst 10 % (1 client)": "56.00 ± 7.45",
        "MB sent": "1.00 ± 0.00"}  # fmt: skip
    assert "±: half of the 95 % interval (Student's t) over 3 seeds, SD: their standard deviation" in scores.note
    assert found.publication().rows[0] == ["A", "61.00 ± 7.45", "56.00 ± 7.45"]
    assert found.table().loc[0, "accuracy ±"] == pytest.approx(7.4524, abs=1e-4)
    alone = by_seed({"A": [0.58], "B": [0.5]})
    assert "±" not in repr(alone) + str(alone.text_tables()[0])


def test_one_reference_for_every_table_and_test() -> None:
    """The best, the one that the comparison names, or the one that a call names."""
    means = {"A": [0.2], "B": [0.9], "C": [0.4]}
    best = by_seed(means)
    named = dataclasses.replace(best, against="C")
    for found, against, expected in ((best, None, "B"), (named, None, "C"), (named, "A", "A"), (best, "A", "A")):
        assert set(found.significance(against)["method"]) == {*means} - {expected}
        for write in (found.to_latex, found.to_markdown, found.to_html):
            assert f"differs significantly from {expected} " in write(against=against)
    assert best.text_tables()[1].header[1] == "against B"
    assert named.text_tables()[1].header[1] == "against C"
    lower = dataclasses.replace(best, metric=coterie.MetricScale("rmse", share=False, higher=False))
    assert lower.text_tables()[1].header[1] == "against A"


def test_a_note_names_only_what_the_table_shows() -> None:
    alone = by_seed({"A": [0.2]}).publication()
    assert alone.note == ""  # one method: nothing is the best, nothing is tested
    few = by_seed({"A": [0.2], "B": [0.9]}).publication()
    assert "†" not in few.note
    assert "Bold: best of the column. No method differs significantly from B at 5 % (corrected by Holm)." in few.note
    assert "Wilcoxon" in few.note
    costs = by_seed({"A": [0.2], "B": [0.9]}).publication(["worst10"]).note
    assert costs == "Bold: best of the column."  # tests are of the mean accuracy, which is not shown


def test_latex(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = table_of(
        folder, capsys, "--format", "latex", "--caption", "A & B", "--label", "tab:a", "--columns", "accuracy,megabytes"
    )
    assert r"\caption{A \& B}" in text
    assert r"\label{tab:a}" in text
    assert r"method & accuracy & MB sent \\" in text
    assert text.count(r"\textbf{") >= 2  # one at least in each column
    assert r"$\pm$" in text
    assert text.count("{") == text.count("}")
    assert r"Mean $\pm$ half of the 95 \% interval (Student's t) over 2 seeds" in text


def test_columns_are_separated_by_commas_or_spaces(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def header(*words: str) -> str:
        main(["table", *words, "--format", "csv"])
        return capsys.readouterr().out.splitlines()[0]

    run, expected = str(folder), "method,accuracy,worst 10 %,MB sent"
    assert header(run, "--columns", "accuracy,worst10,megabytes") == expected
    assert header(run, "--columns", "accuracy", "worst10", "megabytes") == expected
    assert header("--columns", "accuracy,", "worst10, megabytes", run) == expected
    assert header("--columns=accuracy", "worst10", "megabytes", run) == expected


def test_a_table_that_cannot_be_written_leaves_the_file_as_it_was(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "table.tex"
    out.write_text("before")
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", lambda file: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(SystemExit):
            main(["table", str(folder), "--out", str(out)])
    assert "table.tex cannot be written: No space left on device" in capsys.readouterr().err
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("table.tex", "before")]
    main(["table", str(folder), "--out", str(out)])
    assert out.read_text().startswith(r"\begin{table}")


def test_csv_markdown_and_html_agree(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = list(csv.reader(io.StringIO(table_of(folder, capsys, "--format", "csv"))))
    assert rows[0] == ["method", "accuracy", "worst 10 %"]
    assert [row[0] for row in rows[1:]] == ["Local", "FedAvg", "FedAvg-FT"]
    lines = [line for line in table_of(folder, capsys, "--format", "markdown").splitlines() if line.startswith("| ")]
    assert [line.replace("**", "").strip("| ").split(" | ") for line in lines] == rows

    class Cells(html.parser.HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.rows: list[list[str]] = []
            self.inside = False

        def handle_starttag(self, tag: str, attrs: Any) -> None:
            self.rows += [[]] if tag == "tr" else []
            self.inside = self.inside or tag in ("td", "th")

        def handle_endtag(self, tag: str) -> None:
            self.inside = self.inside and tag not in ("td", "th")

        def handle_data(self, text: str) -> None:
            if self.inside:
                self.rows[-1].append(text)

    cells = Cells()
    page = table_of(folder, capsys, "--format", "html")
    cells.feed(page)
    assert cells.rows == rows
    assert "<b>" in page


def test_seeds_of_two_machines_are_one_comparison(folder: Path, tmp_path: Path) -> None:
    """As if all seeds had been run on one."""
    first, more, same = (tmp_path / name for name in ("first", "more", "same"))
    for run in (*folder.glob("local-*"), *folder.glob("fedavg-*")):
        shutil.copytree(run, first / run.name)
    coterie.compare(["local", "fedavg"], data(), "linear", seeds=2, seed=2, out=more, **HOW)
    whole = coterie.compare(["local", "fedavg"], data(), "linear", seeds=4, **HOW).table().set_index("method")
    for given in ((first, more), ([first, str(more)],)):
        found = coterie.load_comparison(*given).table().set_index("method")
        assert set(found.index) == set(whole.index)
        for method, column in itertools.product(whole.index, ("seeds", "accuracy", "accuracy ±", "worst10")):
            assert found.loc[method, column] == pytest.approx(whole.loc[method, column], abs=1e-3)
    shutil.copytree(first, same)
    with pytest.raises(
        CoterieError, match=r"with seed 0 is there twice, in .*first.* and .*same.*; leave one of them out"
    ):
        coterie.load_comparison(first, same)


def test_runs_that_cannot_be_compared(folder: Path, tmp_path: Path) -> None:
    coterie.run("local", toy.toy(), toy.network(), out=tmp_path / "other", rounds=1, backend=HERE)
    with pytest.raises(CoterieError, match="their clients have different samples"):
        coterie.load_comparison(folder, tmp_path / "other")
    (tmp_path / "other" / "result.json").unlink()
    with pytest.raises(CoterieError, match=r"is not finished; `coterie resume"):
        coterie.load_comparison(tmp_path / "other")


def test_a_plot_has_a_line_for_every_method(found: coterie.Comparison) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ax = found.plot()
    assert [line.get_label() for line in ax.get_lines()] == ["Local", "FedAvg", "FedAvg-FT"]
    pyplot.close("all")
