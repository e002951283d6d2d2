"""The folder that a run leaves: configuration, metrics, partition, models, log."""

from __future__ import annotations

import contextlib
import csv
import json
import logging
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from coterie.core.errors import CoterieError
from coterie.federation.checkpoint import decisive, reason, same
from coterie.federation.disk import lock, sync, whole
from coterie.federation.history import POINTS, Round, Summary
from coterie.federation.model_files import write_models
from coterie.federation.result import Result

log = logging.getLogger("coterie")
PHASES = ("send", "train", "receive", "evaluate", "finish")
COLUMNS = ["round", "participants", "left_out", "bytes_up", "bytes_down", *(f"seconds_{phase}" for phase in PHASES)]
CLIENT_COLUMNS = ["round", "client", "point", "split", "correct", "total", "accuracy", "loss"]
ODD = "backslashreplace"  # names of files that are not text are written as \udcff, which JSON reads back


class Folder:
    """Written as the run goes: metrics after every round, models at the end. Nobody else writes there meanwhile."""

    def __init__(
        self,
        path: str | Path,
        config: dict[str, Any],
        splits: Sequence[str] = ("test",),
        newcomers: bool = False,
        resume: bool = False,  # the folder is there, of the same run
    ) -> None:
        self.path, self.config = Path(path), config
        if resume:
            same(dict(decisive(read_config(self.path))), dict(decisive(config)))
        else:
            self._make(config)
        self.lock = lock(self.path / "config.json")
        try:
            if (self.path / "result.json").exists():
                raise CoterieError(f"{self.path} is finished; there is nothing to continue")
            prefixes = ["" if split == "test" else f"{split}_" for split in splits]
            points = [point for point in POINTS if newcomers or not point.startswith("new_")]
            measured = [
                f"{prefix}{point}_{name}" for prefix in prefixes for point in points for name in Summary._fields
            ]
            self.columns = COLUMNS + measured
            self.records: list[Round] = []
            self.behind = False  # whether rounds are missing in the tables, because they could not be written
            self.log = LogFile(self.path / "log.txt", encoding="utf-8", errors=ODD)
        except OSError as error:
            self.lock.close()
            raise CoterieError(f"{self.path} cannot be written to: {error.strerror}") from None
        except CoterieError:
            self.lock.close()
            raise
        self.log.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logging.getLogger("coterie").addHandler(self.log)

    def begin(self, counts: Tensor, partition: Any, picture: str, records: Iterable[Round] = ()) -> None:
        """What is known before the first round, or before the one after these.

        counts: (m, K) training samples; all zero: not known.
        """
        self.records = list(records)
        try:
            if partition is not None:
                partition.save(self.path / "partition.npz")
            if counts.any():
                self.write("partition.svg", picture)
                data = self.config["data"]
                self._table("classes.csv", class_rows(counts, data["class_names"], data.get("ids")))
            self._tables()
        except OSError as error:
            raise CoterieError(f"{self.path} cannot be written to: {error.strerror}") from None

    def write(self, name: str, text: str) -> None:
        """All of it or nothing."""
        with whole(self.path / name) as part:
            part.write_text(text, encoding="utf-8", errors=ODD)

    def add(self, record: Round) -> None:
        """A disk that is full does not end the run: the tables are written later, from the start."""
        self.records.append(record)
        try:
            if self.behind:
                self._tables()
            else:
                self._append("metrics.csv", [self._row(record)])
                self._append("clients.csv", client_rows(record))
            self.behind = False
        except OSError as error:
            if not self.behind:
                log.warning("the metrics of round %d cannot be written: %s", record.number, error.strerror)
            self.behind = True

    def finish(self, result: Result) -> None:
        """result.json comes last: if it is there, all is."""
        try:
            if self.behind:
                self._tables()
            for name in ("metrics.csv", "clients.csv"):
                sync(self.path / name)
            write_models(self.path / "models", result, self.config["data"])
            self._reports(result)
            self.write("result.json", json.dumps(summarise(result), indent=2) + "\n")
        except OSError as error:
            raise CoterieError(
                f"the run has ended, but {self.path} cannot be written to ({reason(error)}); when that is mended, "
                f"`coterie resume {self.path}` goes on from the last checkpoint"
            ) from None

    def close(self) -> None:
        logging.getLogger("coterie").removeHandler(self.log)
        self.log.close()
        self.lock.close()

    def _make(self, config: dict[str, Any]) -> None:
        try:
            self.path.mkdir(parents=True)
            try:
                self.write("config.json", json.dumps(config, indent=2, ensure_ascii=False) + "\n")
            except OSError:
                self.path.rmdir()
                raise
        except FileExistsError:
            raise CoterieError(f"{self.path} exists already; name another folder, or remove it") from None
        except OSError as error:
            raise CoterieError(f"cannot make the folder {self.path}: {error.strerror}") from None

    def _row(self, record: Round) -> list[Any]:
        row = measures(record)
        return [row.get(column, "") for column in self.columns]

    def _tables(self) -> None:
        self._table("metrics.csv", [self.columns, *map(self._row, self.records)])
        self._table("clients.csv", [CLIENT_COLUMNS, *(row for record in self.records for row in client_rows(record))])

    def _table(self, name: str, rows: Iterable[list[Any]]) -> None:
        with whole(self.path / name) as part, part.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(rows)

    def _append(self, name: str, rows: Iterable[list[Any]]) -> None:
        with (self.path / name).open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(rows)

    def _reports(self, result: Result) -> None:
        reported = {f"{name}/{r.number:05}": t.numpy() for r in result.history for name, t in r.report.items()}
        if reported:
            with whole(self.path / "reports.npz") as part, part.open("wb") as file:
                np.savez_compressed(file, allow_pickle=False, **reported)


class LogFile(logging.FileHandler):
    """What cannot be written is lost; it was on the screen too."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


def read_config(path: Path) -> dict[str, Any]:
    """What the run in this folder was told."""
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CoterieError(f"{path} is not the folder of a run: it has no config.json") from None
    except (OSError, ValueError) as error:
        raise CoterieError(f"{path / 'config.json'} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise CoterieError(f"{path / 'config.json'} is not the configuration of a run")
    return config


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
        summary = Summary.of(scores)._asdict()  # not a number, if nobody has samples: a field that is empty
        row |= {f"{prefix}{point}_{name}": round(v, 6) for name, v in summary.items() if not math.isnan(v)}
    return row


def client_rows(record: Round) -> list[list[Any]]:
    return [
        [record.number, client, point, split, int(correct), total, round(correct / max(total, 1), 6), round(loss, 6)]
        for (point, split), scores in record.scores.items()
        for client, correct, total, loss in zip(*(column.tolist() for column in scores), strict=True)
    ]


def class_rows(counts: Tensor, names: Sequence[str], ids: Sequence[int] | None) -> list[list[Any]]:
    """A line for each client: how many training samples of each class it has. ids: None for 0, 1, ..."""
    header = ["client", *(names or range(counts.shape[1]))]
    rows = zip(ids or range(len(counts)), counts.tolist(), strict=True)
    return [header, *([client, *own] for client, own in rows)]


def number(value: float | None) -> float | None:
    """None where there is none: JSON has no other word for it."""
    return value if value is not None and math.isfinite(value) else None


def summarise(result: Result) -> dict[str, Any]:
    """What the run comes to; accuracies in 0..1."""
    return {
        "method": result.method.title,
        "outcomes": [
            {
                "name": o.name,
                "measured": POINTS[o.point],
                "last": {name: number(value) for name, value in o.last._asdict().items()},
                "best_on_test": number(o.best_on_test),
                "best_by_validation": number(o.by_validation),
            }
            for o in result.outcomes()
        ],
        "privacy": result.privacy,
        "rounds": max(record.number for record in result.history),
        "bytes_up": sum(record.bytes_up for record in result.history),
        "bytes_down": sum(record.bytes_down for record in result.history),
        "seconds": {p: round(sum(r.seconds.get(p, 0.0) for r in result.history), 3) for p in PHASES},
        "left_out": sorted({client for record in result.history for client in record.left_out}),
    }
