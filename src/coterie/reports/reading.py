"""A run folder as dataclasses: all that can be read of it, and what is not there."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from coterie.core.errors import CoterieError
from coterie.data.partition import DAMAGED, Partition
from coterie.federation.history import POINTS
from coterie.methods import METHODS
from coterie.reports.compared import place, reference
from coterie.reports.finding import is_run, run_folders

Kind = TypeVar("Kind")
Measures = dict[str, float]  # column of metrics.csv -> value, where there is one


class Score(NamedTuple):
    """One client at one point of measurement."""

    client: int
    correct: int
    total: int  # at least 1

    @property
    def percent(self) -> float:
        return 100 * self.correct / self.total


class Weights(NamedTuple):
    """Row i says of whose heads the head of clients[i] is made."""

    round: int
    clients: tuple[int, ...]  # (S,)
    matrix: NDArray[np.float64]  # (S, S)


class Classes(NamedTuple):
    names: tuple[str, ...]
    counts: NDArray[np.int64]  # (m, K) training samples


@dataclass(frozen=True)
class Run:
    """What a run folder says."""

    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    rounds: Mapping[int, Measures] = field(default_factory=dict)  # number -> measures
    scores: Mapping[str, Sequence[Score]] = field(default_factory=dict)  # point -> clients, in its last round
    scored: Mapping[str, int] = field(default_factory=dict)  # point -> that round
    weights: Sequence[Weights] = ()
    classes: Classes | None = None
    picture: str = ""  # SVG of the partition
    result: Mapping[str, Any] | None = None
    log: str = ""
    missing: Sequence[str] = ()  # what could not be read, in words
    reference: str = ""  # name of what of it the other runs of its comparison were tested against

    @property
    def method(self) -> str:
        return str(self.section("method").get("name") or self.folder.name)

    @property
    def seed(self) -> int:
        return whole(self.section("federation").get("seed"))

    @property
    def planned(self) -> int:
        """Rounds that were asked for."""
        return whole(self.section("federation").get("rounds"))

    @property
    def data(self) -> tuple[str, str]:
        """Name and hash: what makes the clients of two runs the same."""
        data = self.section("data")
        partition = data.get("partition")
        mark = partition.get("hash") if isinstance(partition, dict) else None
        return str(data.get("name", "unknown data")), str(mark or data.get("train_sizes", ""))

    @property
    def told(self) -> list[Mapping[str, Any]]:
        """What result.json says of each outcome."""
        listed = (self.result or {}).get("outcomes")
        return [o for o in listed if isinstance(o, dict)] if isinstance(listed, list) else []

    @property
    def outcomes(self) -> dict[str, str]:
        """Name -> point of what the method reports; of what was measured, if that comes only at the end."""
        points = {text: point for point, text in POINTS.items()}
        found = {str(o.get("name")): points.get(str(o.get("measured")), "") for o in self.told}
        known = {kind.title: kind.results for kind in METHODS.values()}
        reported = found or known.get(self.method, {self.method: "pre"})
        now = {name: point for name, point in reported.items() if self.curve(point)}
        return now or {f"{self.method} ({point})": point for point in self.measured[:1]}

    @property
    def measured(self) -> list[str]:
        """Points of measurement that the run has."""
        return [point for point in POINTS if self.curve(point)]

    def section(self, name: str) -> Mapping[str, Any]:
        """A part of the configuration; empty where it is not there."""
        part = self.config.get(name)
        return part if isinstance(part, dict) else {}

    def curve(self, point: str, split: str = "", measure: str = "mean") -> list[tuple[float, float]]:
        """(round, accuracy in percent); `measure` is a column of metrics.csv: mean over clients, worst10, ..."""
        column = f"{split}{point}_{measure}"
        return [(number, 100 * row[column]) for number, row in self.rounds.items() if column in row]

    def total(self, start: str) -> float:
        """Sum over rounds of all columns that begin so."""
        return sum(v for row in self.rounds.values() for column, v in row.items() if column.startswith(start))


def whole(value: Any) -> int:
    return value if isinstance(value, int) else 0


def read_all(paths: Iterable[str | Path]) -> list[Run]:
    """The runs of these folders, each once; one that holds some, as `coterie compare` leaves, stands for all in it."""
    found: dict[Path, Run] = {}
    for path in paths:
        for run in read_below(Path(path)):
            found.setdefault(run.folder.resolve(), run)
    return list(found.values())


def read_below(path: Path) -> list[Run]:
    """The runs of one folder; those of a comparison in its order, and tested against what it tested against."""
    runs = [read(folder) for folder in run_folders(path)]
    if is_run(path):
        return runs
    ordered = [
        run
        for _, inside in groupby(runs, key=lambda run: run.folder.parent)
        for run in sorted(inside, key=lambda run: place(run.section("command")))
    ]
    return [replace(run, reference=reference(run.section("command"))) for run in ordered]


def read(folder: Path) -> Run:
    missing: list[str] = []

    def part(name: str, reader: Callable[[Path], Kind], always: bool = True) -> Kind | None:
        """`always`: every run has this file."""
        try:
            return reader(folder / name)
        except FileNotFoundError:
            missing.extend([f"{name} is not there"] * always)
        except (*DAMAGED, CoterieError, csv.Error) as error:
            missing.append(f"{name} cannot be read ({error})")
        return None

    run = Run(folder, part("config.json", read_object) or {})
    rounds = part("metrics.csv", read_rounds) or {}
    last, answered = part("clients.csv", read_clients) or ({}, {})
    groups = part("partition.npz", read_groups, always=False) or ()
    clients = whole(run.section("data").get("clients"))
    return replace(
        run,
        rounds=rounds,
        scores={point: scores for point, (_, scores) in last.items()},
        scored={point: number for point, (number, _) in last.items()},
        weights=part("reports.npz", lambda path: read_weights(path, answered, clients, groups), always=False) or [],
        classes=part("classes.csv", read_classes),
        picture=part("partition.svg", read_text) or "",
        result=part("result.json", read_object, always=False),
        log=part("log.txt", read_text, always=False) or "",
        missing=missing,
    )


def read_groups(path: Path) -> tuple[int, ...]:
    if not path.exists():
        raise FileNotFoundError
    return Partition.load(path).groups


def read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def read_object(path: Path) -> dict[str, Any]:
    content = json.loads(read_text(path))
    if not isinstance(content, dict):
        raise ValueError("not a JSON object")
    return content


def lines(path: Path) -> Iterator[str]:
    """The whole lines of a file: one that was being written when the run stopped is left out."""
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        yield from (line for line in file if line.endswith("\n"))


def table(path: Path) -> Iterator[dict[str, str]]:
    yield from (row for row in csv.DictReader(lines(path)) if None not in row and None not in row.values())


def read_rounds(path: Path) -> dict[int, Measures]:
    rounds: dict[int, Measures] = {}
    for row in table(path):
        add_row(rounds, row)
    return rounds


def add_row(rounds: dict[int, Measures], row: Mapping[str, Any]) -> None:
    """A line of metrics.csv. What follows the last round counts to it: bytes and seconds are added."""
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


def read_clients(path: Path) -> tuple[dict[str, tuple[int, list[Score]]], dict[int, list[int]]]:
    """Point -> its last round and the scores of that on the test split; round -> clients that answered in it."""
    last: dict[str, tuple[int, list[Score]]] = {}
    answered: dict[int, list[int]] = {}
    for row in table(path):
        if row["split"] != "test":
            continue
        number, point, client = int(row["round"]), row["point"], int(row["client"])
        if point == "post":
            answered.setdefault(number, []).append(client)
        if point not in last or last[point][0] != number:
            last[point] = (number, [])
        if int(row["total"]):  # a client without samples has no accuracy
            last[point][1].append(Score(client, int(row["correct"]), int(row["total"])))
    return last, answered


def read_weights(
    path: Path, answered: Mapping[int, Sequence[int]], clients: int, groups: Sequence[int]
) -> list[Weights]:
    """Head weights of the rounds whose participants are known; clients of one group stand together."""
    found = []
    with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
        for name in sorted(n for n in file.files if n.startswith("head_weights/")):
            matrix, number = np.asarray(file[name], np.float64), int(name.rsplit("/", 1)[1])
            if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
                raise ValueError(f"{name} is not square")
            ids = answered.get(number) or range(clients)
            if len(ids) == len(matrix) > 0 and np.isfinite(matrix).all():
                known = dict(enumerate(groups)) if len(groups) == clients else {}  # of others, if some are met later
                order = sorted(range(len(ids)), key=lambda i: known.get(ids[i], 0))
                found.append(Weights(number, tuple(ids[i] for i in order), matrix[np.ix_(order, order)]))
    return found


def read_classes(path: Path) -> Classes:
    header, *rows = list(csv.reader(lines(path))) or [[]]
    counts = np.array([[int(n) for n in row[1:]] for row in rows], np.int64)
    if counts.shape != (len(rows), len(header) - 1) or not counts.size:
        raise ValueError("not a table")
    return Classes(tuple(header[1:]), counts)
