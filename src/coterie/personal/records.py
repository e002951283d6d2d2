"""The tables of a run folder, read back."""

from __future__ import annotations

import csv
from pathlib import Path

import torch
from torch import Tensor

from coterie.clients import Scores
from coterie.core import order
from coterie.federation import History, Round, Settings
from coterie.federation.folder import PHASES
from coterie.federation.history import POINTS

Row = dict[str, str]


def table(path: Path) -> list[Row]:
    """Rows by the names of their columns; none where there is no such file."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def read_class_counts(path: Path, clients: int) -> Tensor:
    """(m, K) training samples of each class on each client."""
    with path.open(newline="", encoding="utf-8") as file:
        _, *rows = csv.reader(file)
    if len(rows) != clients:
        raise ValueError(f"{len(rows)} rows for {clients} clients")
    return torch.tensor([[int(count) for count in counts] for _, *counts in rows])


def read_history(path: Path, settings: Settings, clients: int) -> History:
    """What happened, as the run itself recorded it; not with what a server reported beside the accuracies."""
    measured: dict[tuple[int, str, str], list[Row]] = {}
    for row in table(path / "clients.csv"):
        measured.setdefault((int(row["round"]), row["point"], row["split"]), []).append(row)
    return History(read_round(row, measured, settings, clients) for row in table(path / "metrics.csv"))


def read_round(row: Row, measured: dict[tuple[int, str, str], list[Row]], settings: Settings, clients: int) -> Round:
    number = int(row["round"])
    found = [
        (point, split)
        for split in ("test", "validation")
        for point in POINTS
        if row.get(f"{'' if split == 'test' else 'validation_'}{point}_mean") and (number, point, split) in measured
    ]
    joined = settings.joining(clients) == int(row["participants"]) and number <= settings.rounds
    return Round(
        number,
        order.participants(settings.seed, number - 1, clients, settings.joining(clients))
        if joined
        else torch.arange(int(row["participants"])),
        tuple(map(int, row["left_out"].split())),
        {(point, split): read_scores(measured[number, point, split]) for point, split in found},
        int(row["bytes_up"]),
        int(row["bytes_down"]),
        {phase: float(row[f"seconds_{phase}"]) for phase in PHASES if row.get(f"seconds_{phase}")},
    )


def read_scores(rows: list[Row]) -> Scores:
    clients, correct, total = (
        torch.tensor([int(row[name]) for row in rows]) for name in ("client", "correct", "total")
    )
    return Scores(clients, correct.double(), total, torch.tensor([float(row["loss"]) for row in rows]).double())
