"""Charts for papers: where lines and bands must be, the same colors everywhere, fonts inside the files."""

from __future__ import annotations

import re
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

from coterie.analysis import plots
from coterie.analysis.plots import PlotLine
from coterie.core.errors import CoterieError


def test_lines_are_means_and_bands_are_95_percent_intervals() -> None:
    """By hand: of 10 and 14 the mean is 12, the half-width 12.7062 · √8 / √2 (Student's t, one degree of freedom)."""
    _, (ax,) = plots.new_figure(1, 1)
    plots.curves(ax, [PlotLine("A", [(1, [10, 14]), (2, [20, 20])], "fedpac"), PlotLine("B", [(1, [5])], "fedavg")])
    first, second = ax.lines
    np.testing.assert_allclose(first.get_xydata(), [(1, 12), (2, 20)])
    np.testing.assert_allclose(second.get_xydata(), [(1, 5)])
    (band,) = ax.collections  # one seed has none
    corners = band.get_paths()[0].vertices
    assert corners[:, 1].min() == pytest.approx(12 - 2 * 12.7062, rel=1e-4)
    assert 20 in corners[:, 1]
    assert any(y == pytest.approx(12 + 2 * 12.7062, rel=1e-4) for y in corners[:, 1])
    assert ax.get_legend_handles_labels()[1] == ["A", "B"]
    _, (plain,) = plots.new_figure(1, 1)
    plots.curves(plain, [PlotLine("A", [(1, [10, 14])], "fedpac")], bands=False)
    assert not plain.collections


@pytest.mark.parametrize("ending", ["pdf", "svg", "png"])
def test_files_carry_provenance_but_do_not_show_it(ending: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        figure, (ax,) = plots.new_figure(1, 1)
        plots.curves(ax, [PlotLine("A", [(1, [10]), (2, [20])], "fedpac")])
        ax.set_title("words")
        plots.save(figure, tmp_path / f"{name}.{ending}", "Figure 1", "commit abc1234")
    content = (tmp_path / f"a.{ending}").read_bytes()
    assert content == (tmp_path / f"b.{ending}").read_bytes()  # no dates
    assert b"commit abc1234" in content
    if ending == "pdf":
        streams = re.findall(rb"stream\r?\n(.*?)\r?\nendstream", content, re.S)
        inflated = b"".join(s if s[:1] != b"x" else zlib.decompress(s) for s in streams)
        assert b"FontFile2" in content + inflated  # an embedded TrueType font
        assert b"abc1234" not in inflated
    if ending == "svg":
        assert b"<text" not in content  # letters are paths, so no font is needed


def test_what_cannot_be_written() -> None:
    figure, _ = plots.new_figure(1, 1)
    with pytest.raises(CoterieError, match=r"figures are written as \.pdf, \.svg or \.png"):
        plots.save(figure, Path("figure.jpg"), "", "")


def test_without_matplotlib_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(CoterieError, match=r"figures need matplotlib: pip install 'coterie\[plot\]'"):
        plots.new_figure(1, 1)
