"""Figures of runs for papers, drawn by matplotlib: means over seeds, with the 95 % interval as a band."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from coterie.analysis import plots
from coterie.analysis.looks import COLORS
from coterie.analysis.plots import PlotLine
from coterie.core.errors import CoterieError, unknown
from coterie.core.metric_scale import MetricScale
from coterie.core.printable import shortened
from coterie.core.version import VERSION
from coterie.data.picture import LONGEST
from coterie.federation.history import clients_text
from coterie.report.naming import client_label, comparable, dataset
from coterie.report.sections.costs import summed
from coterie.report.seeds import OverSeeds, SeedGroup, grouped
from coterie.runs.disk import check_ours, whole
from coterie.runs.finding import open_runs
from coterie.runs.stored_run import StoredRun

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("pdf", "svg", "png")
LEGEND_COLUMNS, LEGEND_LINE = 3, 0.17  # most names in a line of the legend, and the height of a line in inches
MOST_LABELS = 20  # clients that are named at a heat map


class FigureSize(NamedTuple):
    """Inches of a column (NeurIPS: of the text), and the font size in points."""

    width: float
    height: float
    font: float


SIZES = {"acm": FigureSize(3.33, 2.1, 8), "ieee": FigureSize(3.5, 2.2, 8), "neurips": FigureSize(5.5, 3.0, 9)}


def write_figure(paths: Sequence[str | Path], kind: str, size: str, out: str | Path, format: str) -> Path:
    """Write a figure of these run folders atomically. Its metadata name the runs."""
    runs, path = open_runs(paths), Path(out)
    for run in runs:
        if run.result is None:
            log.warning("%s is not finished; the figure shows the rounds that it has", run.folder)
    figure = draw(runs, kind, size)
    try:
        if format in plots.MARKS:
            check_ours(path, plots.MARKS[format])
        with whole(path, shared=True) as part:
            origin = f"coterie {VERSION}, runs: {', '.join(map(str, paths))}"
            plots.save(figure, part, f"{kind} of {', '.join(Path(p).name for p in paths)}", origin, format)
    except OSError as error:
        raise CoterieError(f"{path} cannot be written: {error.strerror}") from None
    return path


def draw(runs: Sequence[StoredRun], kind: str, size: str = "acm") -> Figure:
    """A figure of runs. kind: of KINDS. size: of SIZES."""
    if kind not in KINDS:
        raise unknown("kind of figure", kind, KINDS)
    if size not in SIZES:
        raise unknown("size", size, SIZES)
    with plots.styled(SIZES[size].font):
        return KINDS[kind](runs, SIZES[size])


def comparable_groups(runs: Sequence[StoredRun]) -> list[SeedGroup]:
    """What runs report, with the seeds of a method together. Runs on unlike data are refused."""
    if len({comparable(run) for run in runs}) > 1:
        names = ", ".join(dict.fromkeys(f"{dataset(run)[0]} by {run.metric.words}" for run in runs))
        raise CoterieError(f"these runs have different data, partitions or metrics ({names}); draw each alone")
    groups = grouped(runs)
    if not groups:
        raise CoterieError("these runs have not measured anything yet")
    return groups


def measured_by_all(group: SeedGroup) -> OverSeeds:
    """(round, score of each seed) for the rounds that all seeds of a method measured."""
    points = group.curve()
    if not points:
        raise CoterieError(f"{group.label}: its seeds have no measured round in common")
    return points


def one_panel(size: FigureSize, names: Sequence[str]) -> tuple[Figure, Axes, int]:
    """A figure with room for a legend of these names below it, and the number of names in a line of it."""
    longest = (max(map(len, names)) + 7) * 0.55 * size.font  # points, with the sample of the line
    columns = max(1, min(LEGEND_COLUMNS, int(72 * size.width / longest)))
    figure, (ax,) = plots.new_figure(1, 1, size.width, size.height + LEGEND_LINE * -(-len(names) // columns))
    return figure, ax, columns


def finished(figure: Figure, ax: Axes, columns: int, metric: MetricScale) -> Figure:
    """Add the legend, and keep a share's axis within 0 to 100 percent where bands go further."""
    if metric.share:
        low, high = ax.get_ylim()
        ax.set_ylim(max(low, -1.0), min(high, 101.0))
    figure.legend(loc="outside lower center", ncols=columns, frameon=False)
    return figure


def curves(runs: Sequence[StoredRun], size: FigureSize) -> Figure:
    groups = comparable_groups(runs)
    figure, ax, columns = one_panel(size, [group.label for group in groups])
    plots.curves(ax, [PlotLine(group.label, measured_by_all(group), group.label) for group in groups])
    ax.set(ylabel=f"test {runs[0].metric.heading}")
    plots.round_axis(ax)
    return finished(figure, ax, columns, runs[0].metric)


def communication(runs: Sequence[StoredRun], size: FigureSize) -> Figure:
    """Scores over megabytes; a method that sends nothing is a horizontal line at its last score."""
    groups = comparable_groups(runs)
    styles = plots.line_styles([group.label for group in groups])
    silent = {g.label: f"{g.label} (sends nothing)" for g in groups if not any(r.total("bytes_") for r in g.runs)}
    figure, ax, columns = one_panel(size, [silent.get(group.label, group.label) for group in groups])
    for group in groups:
        label = group.label
        sent = [dict(summed(run, "bytes_")) for run in group.runs]
        points = [(float(np.mean([s[n] for s in sent])), values) for n, values in measured_by_all(group)]
        if label in silent:
            color, dashes, _ = styles[label]
            ax.axhline(float(np.mean(points[-1][1])), color=color, linestyle=dashes, label=silent[label])
        else:
            plots.curves(ax, [PlotLine(label, points, label)], styles=styles)
    ax.set(xlabel="MB sent, up and down", ylabel=f"test {runs[0].metric.heading}")
    return finished(figure, ax, columns, runs[0].metric)


def clients(runs: Sequence[StoredRun], size: FigureSize) -> Figure:
    """One row per method: a stroke for each client, averaged over the seeds that have it, and a diamond at the mean."""
    groups, metric = comparable_groups(runs), runs[0].metric
    styles = plots.line_styles([group.label for group in groups])
    figure, (ax,) = plots.new_figure(1, 1, size.width, 0.7 + 0.3 * len(groups))
    for row, group in enumerate(groups):
        seeds = group.client_scores()
        if not seeds:
            raise CoterieError(f"{group.label}: its runs have no scores of single clients")
        means = [float(np.mean(values)) for values in seeds.values()]
        ax.plot(means, [row] * len(means), "|", color=styles[group.label].color, markersize=10, alpha=0.6)
        ax.plot([float(np.mean(means))], [row], "D", color="black", markersize=4)
    ax.set(xlabel=f"test {metric.heading}", ylim=(len(groups) - 0.5, -0.5))
    ax.set_yticks(range(len(groups)), [group.label for group in groups])
    ax.grid(False, axis="y")
    return figure


def fairness(runs: Sequence[StoredRun], size: FigureSize) -> Figure:
    """Scores of clients from worst to best; the band is over seeds."""
    groups, metric = comparable_groups(runs), runs[0].metric
    lines = []
    for group in groups:
        points = group.ranked()
        if not points:
            counts = sorted({len(run.last_scores.get(group.point, ())) for run in group.runs})
            found = ", ".join(clients_text(count) for count in counts)
            raise CoterieError(
                f"{group.label}: fairness needs scores of the same number of clients in all seeds, got {found}"
            )
        lines.append(PlotLine(group.label, points, group.label))
    figure, ax, columns = one_panel(size, [group.label for group in groups])
    plots.curves(ax, lines)
    ax.set(xlabel="clients from worst to best, %", ylabel=f"test {metric.heading}")
    return finished(figure, ax, columns, runs[0].metric)


def panels(size: FigureSize, count: int) -> tuple[Figure, list[Axes]]:
    columns = min(2, count)
    width = size.width / columns
    figure, axes = plots.new_figure(-(-count // columns), columns, width, 0.85 * width)
    for ax in axes[count:]:
        ax.set_axis_off()
    return figure, axes


def heads(runs: Sequence[StoredRun], size: FigureSize) -> Figure:
    """The head weights of the last round, for the first seed of each method that reports them."""
    first = {group.label: group.run for group in comparable_groups(runs) if group.run.head_weights}
    if not first:
        raise CoterieError("these runs have no head weights; methods such as fedpac report them")
    figure, axes = panels(size, len(first))
    for ax, (label, run) in zip(axes, first.items(), strict=False):
        final = run.head_weights[-1]
        few = len(final.clients) <= MOST_LABELS // min(2, len(first))
        names = [shortened(client_label(run, client, ""), LONGEST) for client in final.clients]
        plots.heat_map(ax, final.matrix, names if few else [])
        ax.set(title=f"{label}, round {final.round}, seed {run.seed}", xlabel="head of client", ylabel="used by client")
    return figure


def partition(runs: Sequence[StoredRun], size: FigureSize) -> Figure:
    """Training samples of each class on each client, as the area of a dot; one panel for each partition."""
    found = {dataset(run): run for run in reversed(runs)}
    figure, axes = panels(size, len(found))
    for ax, ((name, _), run) in zip(axes, reversed(found.items()), strict=False):
        if run.class_table is None:
            raise CoterieError(f"{run.folder}: {name} has no classes, so there is no partition of classes to draw")
        counts = np.asarray(run.class_table.counts)
        across, up = np.nonzero(counts)
        cell = 72 * size.width / min(2, len(found)) / (max(counts.shape) + 3)  # points
        area = counts[across, up] / counts.max() * min(cell, 14.0) ** 2
        ax.scatter(across, up, s=area, color=COLORS[0].light, linewidths=0)
        ax.set_yticks(range(counts.shape[1]), [str(name) for name in run.class_table.names])
        if run.client_names and len(counts) <= MOST_LABELS // min(2, len(found)):
            names = [shortened(client_label(run, i, ""), LONGEST) for i in range(len(counts))]
            ax.set_xticks(range(len(counts)), names, rotation=90)
        ax.set(title=f"{name}, {clients_text(len(counts))}", xlabel="client", ylabel="class")
    return figure


KINDS: dict[str, Callable[[Sequence[StoredRun], FigureSize], Figure]] = {
    "curves": curves,
    "clients": clients,
    "fairness": fairness,
    "heads": heads,
    "partition": partition,
    "communication": communication,
}
