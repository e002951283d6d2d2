"""The tables of a run folder, as rows and as what is read from them: metrics.csv, clients.csv, ..."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.core import random
from coterie.core.metric_scale import MetricScale
from coterie.execution import Scores
from coterie.federation import History, Round, Settings
from coterie.federation.finals import FinalMetrics
from coterie.federation.history import POINTS, Summary
from coterie.runs.checksums import RunFiles
from coterie.runs.config import read_object

PHASES = ("send", "train", "receive", "evaluate", "finish")
COLUMNS = ["round", "participants", "left_out", "bytes_up", "bytes_down", *(f"seconds_{phase}" for phase in PHASES)]
Measures = dict[str, float]  # column of metrics.csv -> value, if it has one


ClientMetrics = Mapping[str, Mapping[int, Mapping[str, float]]]  # model -> client -> metric -> value, if defined


class MetricsTable(NamedTuple):
    """metrics.csv."""

    rows: Sequence[Mapping[str, str]] = ()
    rounds: Mapping[int, Measures] = {}


class Score(NamedTuple):
    """One client at one point of measurement."""

    client: int
    value: float  # of the run's metric
    total: int  # samples, at least 1
    correct: int | None = None  # samples, if the metric is their share


class ClientTable(NamedTuple):
    """The test split in clients.csv."""

    last: dict[str, list[Score]]  # point -> scores in the last round in which it was measured
    measured: dict[str, int]  # point -> that round
    trained: dict[int, list[int]]  # round -> clients that returned an update


class ClassTable(NamedTuple):
    names: tuple[str, ...]
    counts: NDArray[np.int64]  # (m, K) training samples


def columns_of(splits: Sequence[str], newcomers: bool) -> list[str]:
    """The columns of metrics.csv."""
    points = [point for point in POINTS if newcomers or not point.startswith("new_")]
    return COLUMNS + [
        f"{prefix(split)}{point}_{name}" for split in splits for point in points for name in Summary._fields
    ]


def prefix(split: str) -> str:
    return "" if split == "test" else f"{split}_"


def measures(record: Round) -> dict[str, Any]:
    """One row of metrics.csv."""
    row: dict[str, Any] = {
        "round": record.number,
        "participants": len(record.participants),
        "left_out": " ".join(map(str, record.left_out)),
        "bytes_up": record.bytes_up,
        "bytes_down": record.bytes_down,
        **{f"seconds_{phase}": round(record.seconds[phase], 4) for phase in PHASES if phase in record.seconds},
    }
    for point, split in sorted(record.scores, key=lambda at: (at[1], list(POINTS).index(at[0]))):  # as in the file
        summary = record.summary(point, split)._asdict()  # NaN if no client has samples: an empty cell
        stored = {name: record.metric.stored(v) for name, v in summary.items() if not math.isnan(v)}
        row |= {f"{prefix(split)}{point}_{name}": value for name, value in stored.items()}
    return row


def client_columns(metric: MetricScale) -> list[str]:
    """The columns of clients.csv. Accuracy comes with the number of correct samples."""
    counts = ["correct"] * metric.counts
    return ["round", "client", "point", "split", *counts, "total", metric.name, "loss"]


def client_rows(record: Round) -> list[list[Any]]:
    metric = record.metric

    def values(weighted: float, total: int, loss: float) -> list[Any]:
        value = weighted / max(total, 1)
        counts = [int(weighted)] if metric.counts else []
        return [*counts, total, metric.stored(value) if math.isfinite(value) else "", metric.stored(loss)]

    return [
        [record.number, client, point, split, *values(weighted, total, loss)]
        for (point, split), scores in record.scores.items()
        for client, weighted, total, loss in zip(*(column.tolist() for column in scores), strict=True)
    ]


def class_rows(counts: Tensor, names: Sequence[str], ids: Sequence[int] | None) -> list[list[Any]]:
    """One line per client with its training samples of each class. ids: None for 0, 1, ..."""
    header = ["client", *(names or range(counts.shape[1]))]
    rows = zip(ids or range(len(counts)), counts.tolist(), strict=True)
    return [header, *([client, *own] for client, own in rows)]


def lines(content: bytes) -> Iterator[str]:
    """Complete lines only: a run that was killed may leave part of a line at the end."""
    text = io.StringIO(content.decode("utf-8", "replace"), newline="")
    yield from (line for line in text if line.endswith("\n"))


def rows_of(content: bytes) -> Iterator[dict[str, str]]:
    yield from (row for row in csv.DictReader(lines(content)) if None not in row and None not in row.values())


def read_metrics(content: bytes) -> MetricsTable:
    rows, rounds = list(rows_of(content)), dict[int, Measures]()
    for row in rows:
        add_row(rounds, row)
    return MetricsTable(rows, rounds)


def add_row(rounds: dict[int, Measures], row: Mapping[str, Any]) -> None:
    """Add a row of metrics.csv. The row of the final step adds its bytes and seconds to those of the last round."""
    kept = rounds.setdefault(int(row["round"]), {})
    for column, text in row.items():
        value = finite(text)
        if value is not None:
            adds = column.startswith(("bytes_", "seconds_"))
            kept[column] = kept.get(column, 0.0) + value if adds else value


def finite(text: str | float) -> float | None:
    try:
        value = float(text)
    except ValueError:  # empty: not measured; or a list of clients
        return None
    return value if math.isfinite(value) else None


def score_of(row: Mapping[str, str], metric: MetricScale) -> Score:
    client, total = int(row["client"]), int(row["total"])
    if metric.counts:
        correct = int(row["correct"])
        return Score(client, correct / total, total, correct)
    return Score(client, float(row[metric.name]), total)


def read_clients(content: bytes, metric: MetricScale) -> ClientTable:
    table = ClientTable({}, {}, {})
    add_clients(table, rows_of(content), metric)
    return table


def add_clients(table: ClientTable, rows: Iterable[Mapping[str, str]], metric: MetricScale) -> None:
    """Add rows of clients.csv."""
    for row in rows:
        if row["split"] != "test":
            continue
        number, point, client = int(row["round"]), row["point"], int(row["client"])
        if point == "post":
            table.trained.setdefault(number, []).append(client)
        if table.measured.get(point) != number:
            table.measured[point], table.last[point] = number, []
        if int(row["total"]) and row[metric.name]:  # a client without samples has no score
            table.last[point].append(score_of(row, metric))


def read_evaluation(content: bytes, scales: Sequence[MetricScale]) -> dict[str, Tensor]:
    """The content of evaluation.csv: model -> (m, M) values of these metrics, NaN where undefined."""
    found: dict[str, list[list[float]]] = {}
    for row in rows_of(content):
        found.setdefault(row["model"], []).append([float(row[scale.name] or "nan") for scale in scales])
    return {model: torch.tensor(values, dtype=torch.float64) for model, values in found.items()}


def read_finals(path: Path, scales: tuple[MetricScale, ...]) -> FinalMetrics | None:
    """What the run in this folder measured after its last round; None if it did not."""
    if not (path / "evaluation.csv").exists():
        return None
    files = RunFiles(path)
    confusion = read_object(files.read("result.json")).get("confusion")
    cells = read_confusion(files.read("confusion.csv")) if (path / "confusion.csv").exists() else None
    tables = (None if table is None else torch.tensor(table) for table in (confusion, cells))
    return FinalMetrics(scales, read_evaluation(files.read("evaluation.csv"), scales), *tables)


def read_client_metrics(content: bytes) -> ClientMetrics:
    """The content of evaluation.csv, for any metrics."""
    found: dict[str, dict[int, dict[str, float]]] = {}
    for row in rows_of(content):
        model, client = row.pop("model"), int(row.pop("client"))
        values = {name: value for name, text in row.items() if (value := finite(text)) is not None}
        found.setdefault(model, {})[client] = values
    return found


def read_confusion(content: bytes) -> list[tuple[int, int, int, int]]:
    """Client, label, prediction and samples."""
    return [
        (int(row["client"]), int(row["label"]), int(row["prediction"]), int(row["samples"])) for row in rows_of(content)
    ]


def read_classes(content: bytes) -> ClassTable:
    header, *rows = list(csv.reader(lines(content))) or [[]]
    counts = np.array([[int(n) for n in row[1:]] for row in rows], np.int64)
    if counts.shape != (len(rows), len(header) - 1) or not counts.size:
        raise ValueError("not a table")
    return ClassTable(tuple(header[1:]), counts)


def read_history(
    metrics: MetricsTable, scores: bytes, settings: Settings, num_clients: int, metric: MetricScale
) -> History:
    """The rounds as they were recorded, without the method's reports. scores: content of clients.csv."""
    measured: dict[tuple[int, str, str], list[dict[str, str]]] = {}
    for row in rows_of(scores):
        measured.setdefault((int(row["round"]), row["point"], row["split"]), []).append(row)
    return History(read_round(row, measured, settings, num_clients, metric) for row in metrics.rows)


def read_round(
    row: Mapping[str, str],
    measured: Mapping[tuple[int, str, str], list[dict[str, str]]],
    settings: Settings,
    num_clients: int,
    metric: MetricScale,
) -> Round:
    number, count = int(row["round"]), int(row["participants"])
    found = [
        (point, split)
        for split in ("test", "validation")
        for point in POINTS
        if row.get(f"{prefix(split)}{point}_mean") and (number, point, split) in measured
    ]
    drawn = settings.joining(num_clients, number - 1) == count and number <= settings.rounds
    return Round(
        number,
        random.participants(settings.seed, number - 1, num_clients, count) if drawn else torch.arange(count),
        tuple(map(int, row["left_out"].split())),
        {(point, split): read_scores(measured[number, point, split], metric) for point, split in found},
        int(row["bytes_up"]),
        int(row["bytes_down"]),
        {phase: float(row[f"seconds_{phase}"]) for phase in PHASES if row.get(f"seconds_{phase}")},
        metric=metric,
    )


def read_scores(rows: Sequence[Mapping[str, str]], metric: MetricScale) -> Scores:
    clients, total = (torch.tensor([int(row[name]) for row in rows]) for name in ("client", "total"))
    column = "correct" if metric.counts else metric.name
    value = torch.tensor([float(row[column] or "nan") for row in rows], dtype=torch.float64)
    weighted = value if metric.counts else torch.where(total > 0, value * total, 0.0)
    return Scores(clients, weighted, total, torch.tensor([float(row["loss"]) for row in rows]).double())
