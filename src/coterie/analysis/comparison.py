"""Methods on the same data: scores over seeds, paired tests, tables and plots."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from coterie.analysis.outcomes import NEW
from coterie.analysis.paired import ClientScores, paired_tests, verdicts
from coterie.analysis.plots import Curve, draw_curves
from coterie.analysis.publication import columns_of, publication
from coterie.analysis.significance import Spread
from coterie.analysis.tables import TextTable, as_csv, as_html, frame, latex, markdown
from coterie.core.metric_scale import ACCURACY_SCALE, MetricScale
from coterie.federation.history import clients_text, worst_tenth_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WORST = "worst 10 %"
INTERVAL = "±: half of the 95 % interval (Student's t)"
SHOWN = {"SD clients": "std", WORST: "worst10", "before": "pre", "after": "post", "global": "global"}
SHOWN |= {"by validation": "best_by_validation", **{name: key for key, name in NEW.items()}}

Row = Mapping[str, Any]


@dataclass(frozen=True, repr=False)
class Comparison:
    """Methods on the same data, each with several seeds. `coterie.compare` makes one.

    `table()` and `significance()` return pandas DataFrames where pandas is installed, else lists of dicts.

    Everything that tests for significance takes `against`, the method that the others are tested against. Default: that
    of the comparison, if one was named; else the method with the best mean of the metric.
    """

    outcomes: Sequence[Row]  # one row per run and reported number, as in compare.json
    data: str  # name of the dataset
    num_clients: int
    against: str | None = None  # method that the others are tested against; None: the best by the metric
    curves: Mapping[str, Sequence[Curve]] = field(default_factory=dict)  # method -> scores over rounds, for each seed
    metric: MetricScale = ACCURACY_SCALE  # what scores are of
    others: Sequence[MetricScale] = ()  # all metrics of the task, measured after the last round

    @property
    def methods(self) -> list[str]:
        """Names of the methods, in order."""
        return list(self.groups())

    @property
    def seeds(self) -> int:
        """Number of runs of a method, at most."""
        return max(map(len, self.groups().values()), default=0)

    def groups(self) -> dict[str, list[Row]]:
        """Method -> its rows."""
        found: dict[str, list[Row]] = {}
        for row in self.outcomes:
            found.setdefault(row["method"], []).append(row)
        return found

    def table(self) -> Any:
        """One row per method: mean over seeds of each column, shares in percent; ± is half of the 95 % interval."""
        rows = []
        for name, group in self.groups().items():
            row: dict[str, Any] = {"method": name, "seeds": len(group)}
            for column, how in columns_of(self.metric, self.others).items():
                values = how.values(group)
                if values:
                    spread = Spread.of(values)
                    row |= {column: spread.mean, f"{column} ±": spread.half}
            rows.append(row)
        return frame(rows)

    def significance(self, against: str | None = None) -> Any:
        """One row per other method: its difference to `against`, and a paired test (p, corrected by Holm).

        Differences of shares are in points.

        against: a method of the comparison. Default: the comparison's own, else the best.
        """
        found, _ = verdicts(self.samples(), self.reference(against), self.metric)
        return frame([verdict._asdict() for verdict in found])

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the mean test score over rounds, with the 95 % interval over seeds. Needs matplotlib."""
        return draw_curves(self.curves, f"{self.data}, {clients_text(self.num_clients)}", ax, self.metric)

    def to_latex(
        self,
        columns: Sequence[str] = (),
        caption: str | None = None,
        label: str | None = None,
        against: str | None = None,
    ) -> str:
        """A LaTeX table (booktabs): mean ± half of the 95 % interval, best in bold, † where a method differs
        significantly from `against`.

        columns: names in `table()`. Default: the metric and "worst10".
        against: as for `significance()`.
        """
        return latex(self.publication(columns, against, caption, label))

    def to_markdown(self, columns: Sequence[str] = (), caption: str | None = None, against: str | None = None) -> str:
        """The same table in Markdown."""
        return markdown(self.publication(columns, against, caption))

    def to_html(self, columns: Sequence[str] = (), caption: str | None = None, against: str | None = None) -> str:
        """The same table in HTML."""
        return as_html(self.publication(columns, against, caption))

    def to_csv(self, columns: Sequence[str] = (), caption: str | None = None, against: str | None = None) -> str:
        """The same table as comma-separated values, without bold."""
        return as_csv(self.publication(columns, against, caption))

    def publication(
        self,
        columns: Sequence[str] = (),
        against: str | None = None,
        caption: str | None = None,
        label: str | None = None,
    ) -> TextTable:
        """The table of a paper."""
        unit = " in percent" * self.metric.share
        about = caption or f"Test {self.metric.words}{unit} on {clients_text(self.num_clients)} of {self.data}"
        tested = self.reference(against)
        return publication(self.groups(), self.samples(), about, tested, columns, label, self.metric, self.others)

    def text_tables(self) -> list[TextTable]:
        """What `coterie compare` prints: all scores, and the paired tests where there are several methods."""
        groups, many, private = self.groups(), self.seeds > 1, any(o.get("privacy") for o in self.outcomes)
        used = {n: k for n, k in SHOWN.items() if any(o.get(k) is not None for o in self.outcomes)}
        tested = [len(o["clients"]) for o in self.outcomes]
        metric = self.metric
        tables = [
            TextTable(
                f"{metric.title} on {self.num_clients} clients of {self.data}{', percent' * metric.share}",
                [
                    "method",
                    metric.words,
                    *(["SD"] if many else []),
                    *(f"{name} ({worst_tenth_text(tested)})" if name == WORST else name for name in used),
                    *(["ε"] if private else []),
                    "MB sent",
                ],
                [
                    [
                        name,
                        cell(group, "mean", metric),
                        *([deviation(group, metric)] if many else []),
                        *(cell(group, key, metric) for key in used.values()),
                        *([privacy(group)] if private else []),
                        cell(group, "megabytes"),
                    ]
                    for name, group in groups.items()
                ],
                f"{metric.words}: mean over clients after the last round, measured where the method's paper does; "
                "before and after: personal model before and after local training"
                + (over_seeds(self.outcomes, self.seeds) if many else ""),
            )
        ]
        if len(groups) > 1:
            title = f"Paired tests, difference in {'points' if metric.share else metric.words}"
            tables.append(paired_tests(self.samples(), self.reference(), title, metric))
        return tables

    def samples(self) -> dict[str, ClientScores]:
        """Method -> score of each client in each run."""
        return {
            name: {
                (str(o.get("content", "")), o["seed"], c): a
                for o in group
                for c, a in zip(o["clients"], o["scores"], strict=True)
            }
            for name, group in self.groups().items()
        }

    def reference(self, against: str | None = None) -> str:
        """The method that the others are tested against: this one, else the comparison's own, else the best."""
        groups = self.groups()
        best = self.metric.best(groups, lambda name: Spread.of([row["mean"] for row in groups[name]]).mean)
        return against or self.against or best

    def __repr__(self) -> str:
        unit = " %" * self.metric.share
        cells = {name: cell(group, "mean", self.metric) for name, group in self.groups().items()}
        undefined = f"{self.metric.words} is undefined for all clients"
        methods = "\n".join(f"  {name}: {undefined if text == '-' else text + unit}" for name, text in cells.items())
        seeds = f"{self.seeds} seed{'' if self.seeds == 1 else 's'}"
        interval = " (±: half of the 95 % interval)" if self.seeds > 1 else ""
        return f"Comparison on {self.data}, {clients_text(self.num_clients)}, {seeds}{interval}\n{methods}"

    def _repr_html_(self) -> str:
        return "".join(as_html(table) for table in self.text_tables())


def over_seeds(outcomes: Sequence[Row], seeds: int) -> str:
    """The variation that the interval over seeds covers."""
    several = len({o.get("content") for o in outcomes}) > 1
    includes = (
        "each seed has its own partition, which the interval includes"
        if several
        else "the partition is the same, so the interval does not include its choice (--partition-seed vary does)"
    )
    return f"; {INTERVAL} over {seeds} seeds, SD: their standard deviation; {includes}"


def cell(group: Sequence[Row], key: str, metric: MetricScale | None = None) -> str:
    """Mean ± half of the 95 % interval of a score, or of another number if there is no metric."""
    values = [o[key] for o in group if o.get(key) is not None]
    return "-" if all(map(math.isnan, values)) else spread_text(values, metric)


def privacy(group: Sequence[Row]) -> str:
    """The largest ε of these runs."""
    found = [o["privacy"]["epsilon"] for o in group if o.get("privacy")]
    return f"{max(found):.4g}" if found else "-"


def deviation(group: Sequence[Row], metric: MetricScale) -> str:
    """The standard deviation over seeds."""
    std = Spread.of([metric.factor * o["mean"] for o in group]).std
    return "-" if std is None or math.isnan(std) else metric.written(std)


def spread_text(values: Sequence[float], metric: MetricScale | None) -> str:
    """Mean ± half of the 95 % interval."""
    found, written = Spread.of([metric.factor * v for v in values] if metric else values), metric or ACCURACY_SCALE
    mean = written.written(found.mean)
    return mean if found.half is None else f"{mean} ± {written.written(found.half)}"
