"""The folder that a run leaves: configuration, metrics, partition, models, log."""

from __future__ import annotations

import csv
import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save_file

from coterie.core import tree
from coterie.core.errors import CoterieError
from coterie.core.samples import FederatedData
from coterie.federation.history import POINTS, Round, Summary
from coterie.federation.result import Result

PHASES = ("send", "train", "receive", "evaluate", "finish")
COLUMNS = ["round", "participants", "left_out", "bytes_up", "bytes_down", *(f"seconds_{phase}" for phase in PHASES)]
CLIENT_COLUMNS = ["round", "client", "point", "split", "correct", "total", "accuracy", "loss"]


class Folder:
    """Written as the run goes: metrics after every round, models at the end."""

    def __init__(self, path: str | Path, config: dict[str, Any], data: FederatedData, newcomers: bool = False) -> None:
        self.path = Path(path)
        try:
            self.path.mkdir(parents=True)
        except FileExistsError:
            raise CoterieError(f"{self.path} exists already; name another folder, or remove it") from None
        except OSError as error:
            raise CoterieError(f"cannot make the folder {self.path}: {error.strerror}") from None
        self.write("config.json", json.dumps(config, indent=2, ensure_ascii=False) + "\n")
        if data.partition is not None:
            data.partition.save(self.path / "partition.npz")
        prefixes = [""] if data.validation is None else ["", "validation_"]
        points = [point for point in POINTS if newcomers or not point.startswith("new_")]
        measured = [f"{prefix}{point}_{name}" for prefix in prefixes for point in points for name in Summary._fields]
        self.columns = COLUMNS + measured
        self._rows("metrics.csv", [self.columns], "w")
        self._rows("clients.csv", [CLIENT_COLUMNS], "w")
        self._rows("classes.csv", class_rows(data), "w")
        self.log = logging.FileHandler(self.path / "log.txt", encoding="utf-8")
        self.log.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logging.getLogger("coterie").addHandler(self.log)

    def write(self, name: str, text: str) -> None:
        """All of it or nothing."""
        part = self.path / f"{name}.part"
        part.write_text(text, encoding="utf-8")
        os.replace(part, self.path / name)

    def add(self, record: Round) -> None:
        row = measures(record)
        self._rows("metrics.csv", [[row.get(column, "") for column in self.columns]], "a")
        self._rows("clients.csv", client_rows(record), "a")

    def close(self, result: Result | None = None) -> None:
        if result is not None:
            self._models(result)
            self._reports(result)
            self.write("result.json", json.dumps(summarise(result), indent=2) + "\n")
        logging.getLogger("coterie").removeHandler(self.log)
        self.log.close()

    def _rows(self, name: str, rows: Iterable[list[Any]], mode: str) -> None:
        with (self.path / name).open(mode, newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(rows)

    def _models(self, result: Result) -> None:
        models = self.path / "models"
        models.mkdir()
        about = {"method": result.method.title, "data": result.data.name, "classes": str(result.data.classes)}
        save_file(plain(tree.flatten(result.server)), models / "server.safetensors", about)
        digits = len(str(len(result.states) - 1))
        for client in range(len(result.states)):
            path = models / f"client-{client:0{digits}}.safetensors"
            save_file(plain(result.personal_weights(client)), path, {**about, "client": str(client)})

    def _reports(self, result: Result) -> None:
        reported = {f"{name}/{r.number:05}": t.numpy() for r in result.history for name, t in r.report.items()}
        if reported:
            np.savez_compressed(self.path / "reports.npz", allow_pickle=False, **reported)


def plain(tensors: tree.Tree) -> tree.Tree:
    return {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}


def measures(record: Round) -> dict[str, Any]:
    """One row of metrics.csv."""
    row: dict[str, Any] = {
        "round": record.number,
        "participants": len(record.participants),
        "left_out": " ".join(map(str, record.left_out)),
        "bytes_up": record.bytes_up,
        "bytes_down": record.bytes_down,
        **{f"seconds_{phase}": round(seconds, 4) for phase, seconds in record.seconds.items()},
    }
    for (point, split), scores in record.scores.items():
        prefix = "" if split == "test" else f"{split}_"
        row |= {f"{prefix}{point}_{name}": round(v, 6) for name, v in Summary.of(scores)._asdict().items()}
    return row


def client_rows(record: Round) -> list[list[Any]]:
    return [
        [record.number, client, point, split, int(correct), total, round(correct / max(total, 1), 6), round(loss, 6)]
        for (point, split), scores in record.scores.items()
        for client, correct, total, loss in zip(*(column.tolist() for column in scores), strict=True)
    ]


def class_rows(data: FederatedData) -> list[list[Any]]:
    """A line for each client: how many training samples of each class it has."""
    names = data.class_names or range(data.classes)
    counts = data.train.class_counts(data.classes).tolist()
    return [["client", *names], *([client, *own] for client, own in enumerate(counts))]


def summarise(result: Result) -> dict[str, Any]:
    """What the run comes to; accuracies in 0..1."""
    return {
        "method": result.method.title,
        "outcomes": [
            {
                "name": o.name,
                "measured": POINTS[o.point],
                "last": o.last._asdict(),
                "best_on_test": o.best_on_test,
                "best_by_validation": o.by_validation,
            }
            for o in result.outcomes()
        ],
        "rounds": max(record.number for record in result.history),
        "bytes_up": sum(record.bytes_up for record in result.history),
        "bytes_down": sum(record.bytes_down for record in result.history),
        "seconds": {p: round(sum(r.seconds.get(p, 0.0) for r in result.history), 3) for p in PHASES},
        "left_out": sorted({client for record in result.history for client in record.left_out}),
    }
