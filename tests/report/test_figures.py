"""Figures of runs for papers: means and bands over seeds, sizes, fonts, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import coterie
from coterie.analysis import plots
from coterie.analysis.looks import looks
from coterie.cli import main
from coterie.core.errors import CoterieError
from coterie.report.figures import KINDS, SIZES, draw, write_figure
from coterie.report.seeds import grouped
from coterie.runs.head_weights import HeadWeights
from coterie.runs.stored_run import StoredRun
from coterie.runs.tables import ClientTable, Score


class RunInMemory(StoredRun):
    def __init__(self, seed: int, curve: list[float], clients: list[float], data: str = "toy", sent: float = 1e6):
        super().__init__(f"run-{seed}")
        self.config = {
            "method": {"name": "FedPer", "class": "fedper"},
            "federation": {"rounds": 3, "seed": seed},
            "data": {"name": data},
        }
        self.rounds = {i + 1: {"pre_mean": v, "bytes_up": sent, "bytes_down": sent} for i, v in enumerate(curve)}
        self.client_table = ClientTable({"pre": [Score(i, v, 10) for i, v in enumerate(clients)]}, {}, {})
        self.result = None


def two_seeds(sent: float = 1e6) -> list[RunInMemory]:
    return [RunInMemory(0, [0.5, 0.6, 0.9], [0.9, 0.1], sent=sent), RunInMemory(1, [0.7, 0.8], [0.3, 0.5], sent=sent)]


def test_a_curve_is_the_mean_over_seeds_of_the_rounds_that_all_have_with_a_band() -> None:
    (ax,) = draw(two_seeds(), "curves").axes
    (line,) = ax.lines
    assert np.allclose(line.get_xydata(), [[1, 60], [2, 70]])
    assert line.get_color() == plots.line_styles(["fedper"])["fedper"].color
    half = stats.t.ppf(0.975, 1) * np.std([50, 70], ddof=1) / np.sqrt(2)
    (band,) = ax.collections
    at_first = [y for x, y in band.get_paths()[0].vertices if x == 1]
    assert np.allclose([min(at_first), max(at_first)], [60 - half, 60 + half])


def test_rounds_are_whole_numbers() -> None:
    for ax in (draw(two_seeds(), "curves").axes[0], plots.draw_curves({"FedPer": [[(1, 0.5), (2, 0.6)]]}, "")):
        assert ax.get_xlabel() == "round"
        assert all(tick == round(tick) for tick in ax.get_xticks())


def test_heads_are_named_after_clients_and_nothing_is_cut(tmp_path: Path) -> None:
    run = RunInMemory(0, [0.5], [0.5])
    run.config["data"] |= {"clients": 2, "client_names": ["long-beach", "a-hospital-with-a-long-name"]}
    run.head_weights = [HeadWeights(3, (1, 0), np.eye(2))]
    figure = draw([run], "heads")
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["a-hospital-with…", "long-beach"]
    plots.save(figure, tmp_path / "heads.png", "", "")
    width = figure.get_size_inches()[0] * figure.dpi
    assert all(ax.get_tightbbox().x0 >= 0 and ax.get_tightbbox().x1 <= width for ax in figure.axes)


@pytest.mark.parametrize("format", ["pdf", "svg", "png"])
def test_only_figures_are_overwritten(format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coterie.report.figures.open_runs", lambda paths: two_seeds())
    path = tmp_path / f"a.{format}"
    path.write_text("mine")
    with pytest.raises(CoterieError, match=r"a\.... exists already and was not written by Coterie"):
        write_figure(["run"], "curves", "acm", path, format)
    assert path.read_text() == "mine"
    path.write_text("")  # nothing is lost
    for _ in range(2):
        write_figure(["run"], "curves", "acm", path, format)


def test_fairness_ranks_clients_in_every_seed_and_clients_averages_each_client() -> None:
    assert np.allclose(draw(two_seeds(), "fairness").axes[0].lines[0].get_xydata(), [[50, 20], [100, 70]])
    strokes, mean = draw(two_seeds(), "clients").axes[0].lines
    assert np.allclose(strokes.get_xdata(), [60, 30])
    assert np.allclose(mean.get_xdata(), [45])


def test_communication_counts_both_ways_and_a_silent_method_is_a_level_line() -> None:
    assert np.allclose(draw(two_seeds(), "communication").axes[0].lines[0].get_xydata(), [[2, 60], [4, 70]])
    (level,) = draw(two_seeds(sent=0), "communication").axes[0].lines
    assert np.allclose(level.get_ydata(), 70)
    assert level.get_label() == "FedPer (sends nothing)"


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(CoterieError, match="different data, partitions or metrics"):
        draw([RunInMemory(0, [0.5], [0.5]), RunInMemory(1, [0.5], [0.5], data="other")], "curves")
    with pytest.raises(CoterieError, match="same number of clients in all seeds, got 1 client, 2 clients"):
        draw([RunInMemory(0, [0.5], [0.5]), RunInMemory(1, [0.5], [0.5, 0.6])], "fairness")
    with pytest.raises(CoterieError, match="no head weights"):
        draw(two_seeds(), "heads")
    with pytest.raises(CoterieError, match="did you mean 'curves'"):
        draw(two_seeds(), "curve")


def test_runs_on_different_data_are_named_after_them_and_keep_the_color_of_their_method() -> None:
    groups = grouped([*two_seeds(), RunInMemory(0, [0.5], [0.5], data="other")])
    assert [(group.label, len(group.runs)) for group in groups] == [("FedPer on toy", 2), ("FedPer on other", 1)]
    assert groups[0].look.color == looks(["FedPer"])["FedPer"].color


def test_an_unfinished_run_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("coterie.report.figures.open_runs", lambda paths: two_seeds())
    write_figure(["runs/some"], "curves", "acm", tmp_path / "f.svg", "svg")
    assert "run-1 is not finished; the figure shows the rounds that it has" in caplog.text


@pytest.mark.long
def test_the_command_writes_every_kind_with_embedded_fonts_at_the_size_of_the_venue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = coterie.load_clients(num_clients=3, local_size=20, test_size=10)
    run = tmp_path / "run"
    coterie.run("fedpac", data, "linear", rounds=1, out=run, progress=False)
    for kind in KINDS:
        out = tmp_path / f"{kind}.pdf"
        main(["plot", str(run), "--kind", kind, "--size", "ieee", "--out", str(out)])
        content = out.read_bytes()
        assert b"/FontFile2" in content
        assert b"/Type3" not in content
        box = re.search(rb"/MediaBox \[ ?0 0 ([\d.]+)", content)
        assert box
        assert float(box[1]) == pytest.approx(72 * SIZES["ieee"].width, abs=0.1)
    assert capsys.readouterr().out.split() == [str(tmp_path / f"{kind}.pdf") for kind in KINDS]
    with pytest.raises(SystemExit):
        main(["plot", str(run), "--format", "svg", "--out", str(tmp_path / "curves.pdf")])
    assert "does not end in .svg" in capsys.readouterr().err
