"""Publication charts with matplotlib (`pip install 'coterie[plot]'`): pure functions from numbers to Axes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from coterie.analysis.looks import COLORS, looks
from coterie.analysis.significance import Spread
from coterie.core.context import holding
from coterie.core.errors import CoterieError
from coterie.core.metric_scale import ACCURACY_SCALE, MetricScale

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DASHES = ("-", "--", ":", "-.", (0, (6, 2, 1, 2, 1, 2)), (0, (1, 3)), (0, (8, 2)))
MARKERS = "osD^vP*X"
MARKS = {  # in the files that `save` writes
    "pdf": b"/Creator (Coterie)",
    "svg": b"<dc:title>Coterie</dc:title>",
    "png": b"Software\x00Coterie",
}
SHORT = 3  # characters of labels that need not be turned
STYLE: dict[Any, Any] = {
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.alpha": 0.3,
    "pdf.fonttype": 42,  # embeds TrueType; journals refuse the default, Type 3
    "ps.fonttype": 42,
    "svg.fonttype": "path",
    "svg.hashsalt": "coterie",  # the same figure gives the same file
}
FONT: ContextVar[float] = ContextVar("font", default=9)  # points


Curve = Sequence[tuple[int, float]]  # one training: (round, score; shares in 0..1)


class PlotLine(NamedTuple):
    """A method's line in a chart."""

    name: str  # in the legend
    points: Sequence[tuple[float, Sequence[float]]]  # x ascending, and one y for each seed
    method: str  # decides color, dashes and marker


class LineStyle(NamedTuple):
    """A look in matplotlib's terms."""

    color: str
    dashes: Any
    marker: str


def new_figure(rows: int, columns: int, width: float = 3.4, height: float = 2.5) -> tuple[Figure, list[Axes]]:
    """A figure in our style and its axes, row by row. width, height: of each, in inches."""
    with styled():
        from matplotlib.figure import Figure

        figure = Figure((columns * width, rows * height), layout="constrained")
        return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


@contextmanager
def styled(font: float | None = None) -> Iterator[None]:
    """Draw in our style. font: size in points; default: that of an enclosing `styled`, or of the style."""
    try:
        import matplotlib
    except ImportError:
        raise CoterieError("figures need matplotlib: pip install 'coterie[plot]'") from None
    with holding(FONT, font or FONT.get()) as size, matplotlib.rc_context(STYLE | {"font.size": size}):
        yield


def curves(
    ax: Axes, series: Sequence[PlotLine], bands: bool = True, styles: Mapping[str, LineStyle] | None = None
) -> None:
    """Mean over seeds, and with `bands` their 95 % interval where there are several.

    styles: one for each method; default: the styles that these lines would have alone.
    """
    styles = styles or line_styles([line.method for line in series])
    for name, points, method in series:
        x = np.array([at for at, _ in points])
        means = np.array([np.mean(values) for _, values in points])
        color, dashes, marker = styles[method]
        every = max(len(x) // 8, 1)
        ax.plot(x, means, color=color, linestyle=dashes, marker=marker, markevery=every, markersize=3.5, label=name)
        halves = np.array([Spread.of(values).half or 0.0 for _, values in points])
        if bands and halves.any():
            ax.fill_between(x, means - halves, means + halves, color=color, alpha=0.15, linewidth=0)


def draw_curves(
    curves_by_name: Mapping[str, Sequence[Curve]],
    title: str,
    ax: Axes | None = None,
    metric: MetricScale = ACCURACY_SCALE,
) -> Axes:
    """Scores over rounds: one line per name, from its trainings with different seeds.

    ax: axes to draw into; default: a new figure.
    """
    ax = new_axes() if ax is None else ax
    lines = []
    for name, runs in curves_by_name.items():
        by_round: dict[int, list[float]] = {}
        for number, score in (point for curve in runs for point in curve):
            by_round.setdefault(number, []).append(metric.factor * score)
        lines.append(PlotLine(name, sorted(by_round.items()), name))
    curves(ax, lines)
    ax.set(title=title, ylabel=f"test {metric.heading}")
    round_axis(ax)
    if lines:
        ax.legend()
    return ax


def round_axis(ax: Axes) -> None:
    """Label the axis of rounds, which are whole numbers."""
    from matplotlib.ticker import MaxNLocator

    ax.set_xlabel("round")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def new_axes() -> Axes:
    """Axes of a figure that notebooks show."""
    try:
        from matplotlib import pyplot
    except ImportError:
        raise CoterieError("plots need matplotlib: pip install 'coterie[plot]'") from None
    axes: Axes = pyplot.subplots()[1]
    return axes


def heat_map(ax: Axes, matrix: ArrayLike, labels: Sequence[str]) -> None:
    """Shares in 0..1, on a square-root scale. labels: of rows and columns, or empty."""
    from matplotlib.colors import PowerNorm

    image = ax.imshow(np.asarray(matrix), cmap="cividis", norm=PowerNorm(0.5, 0, 1))
    ax.grid(False)
    ax.set_xticks(range(len(labels)), labels, rotation=90 if max(map(len, labels), default=0) > SHORT else 0)
    ax.set_yticks(range(len(labels)), labels)
    ax.figure.colorbar(image, ax=ax, shrink=0.8)


def line_styles(labels: Sequence[str]) -> dict[str, LineStyle]:
    """The styles of a figure's methods, the same as in `coterie report`."""
    found = looks(list(dict.fromkeys(labels)))
    return {
        label: LineStyle(COLORS[own.color].light, DASHES[own.dashes], MARKERS[own.marker])
        for label, own in found.items()
    }


def save(figure: Figure, path: Path, title: str, provenance: str, format: str | None = None) -> None:
    """Write PDF, SVG or PNG (default: by the ending). Provenance goes into the file's metadata, not the picture."""
    import matplotlib

    kinds: dict[str, Mapping[str, Any]] = {
        "pdf": {"Title": title, "Subject": provenance, "Creator": "Coterie", "CreationDate": None},
        "svg": {"Title": title, "Description": provenance, "Creator": "Coterie", "Date": None},
        "png": {"Title": title, "Description": provenance, "Software": "Coterie"},
    }
    format = format or path.suffix.removeprefix(".")
    if format not in kinds:
        raise CoterieError(f"{path}: figures are written as .pdf, .svg or .png")
    with matplotlib.rc_context(STYLE):
        figure.draw_without_rendering()  # the layout settles in two steps: labels of a color bar were cut
        figure.savefig(path, format=format, metadata=dict(kinds[format]), dpi=300)
