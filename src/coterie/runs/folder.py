"""Write a run folder: configuration, metrics, partition, models and log."""

from __future__ import annotations

import contextlib
import csv
import json
import logging
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from coterie.core import tree
from coterie.core.errors import CoterieError, Diverged, some_of
from coterie.core.printable import Escaping
from coterie.federation.history import Round
from coterie.federation.trained import TrainedFederation
from coterie.runs.checkpoint_files import reason
from coterie.runs.checksums import CHECKSUMS, FORMAT, GROWING, Changed, Checksum, GrowingTable, RunFiles, to_json
from coterie.runs.config import metric_of, read_config
from coterie.runs.describe import summarise
from coterie.runs.disk import check_tree, lock, open_inside, read_inside, sync, whole, writing
from coterie.runs.matching import decisive, same
from coterie.runs.model_files import SUMS, write_models
from coterie.runs.tables import class_rows, client_columns, client_rows, columns_of, measures

log = logging.getLogger("coterie")
EXTENDED = ("federation", "ending", "protection")  # sections that change when a run is extended
ODD = "backslashreplace"  # file names that are not UTF-8 are written as \udcff, which JSON reads back


class Folder:
    """The writer of a run folder: metrics after every round, models at the end. It locks the folder."""

    def __init__(
        self,
        path: str | Path,
        config: dict[str, Any],
        splits: Sequence[str] = ("test",),
        newcomers: bool = False,
        resume: bool = False,  # the folder exists and holds the same run
    ) -> None:
        self.path, self.config = Path(path), {"format": FORMAT, **config}
        self.sums: dict[str, Checksum] = {}  # of files that are written
        self.tables = {name: GrowingTable() for name in GROWING}
        self.writing, self.finished = threading.Lock(), False  # for checksums, which the checkpoint thread writes too
        if resume:
            check_tree(self.path)
            RunFiles(self.path).verify()  # a finished run that is extended
            self._check_tables()
        self.before = read_config(self.path) if resume else self.config  # in the folder
        if resume:
            same(dict(decisive(self.before)), dict(decisive(config)))
            self.sums["config.json"] = Checksum.of(read_inside(self.path, "config.json"))
        else:
            self._make()
        self.lock = lock(self.path / "config.json")
        self.columns = columns_of(splits, newcomers)
        self.records: list[Round] = []
        self.behind = False  # whether rounds are missing in the tables because a write failed
        try:
            with writing(self.path):
                self.log = LogFile(self.path / "log.txt", encoding="utf-8", errors=ODD)
        except CoterieError:
            self.lock.close()
            raise
        self.log.setFormatter(Escaping("%(asctime)s %(levelname)s %(message)s"))
        logging.getLogger("coterie").addHandler(self.log)

    def note(self, lines: Iterable[str]) -> None:
        """Add lines to log.txt."""
        for line in lines:
            self.log.handle(logging.LogRecord("coterie", logging.INFO, "", 0, "%s", (line,), None))

    def begin(self, counts: Tensor, partition: Any, picture: str, records: Iterable[Round] = ()) -> None:
        """Write what is known before training. records: rounds of a run that is resumed.

        counts: (m, K) training samples; all zero: unknown.
        """
        self.records = list(records)
        with writing(self.path):
            (self.path / CHECKSUMS).unlink(missing_ok=True)  # tables are written again
            if partition is not None:
                with whole(self.path / "partition.npz") as part, part.open("wb") as file:
                    partition.write(file)
                self.sums["partition.npz"] = Checksum.of(read_inside(self.path, "partition.npz"))
            if counts.any():
                self.write("partition.svg", picture)
                data = self.config["data"]
                self._table("classes.csv", class_rows(counts, data["class_names"], data.get("ids")))
            self._tables()
            self.checksums()()

    def reopen(self, completed: int) -> None:
        """Turn a finished run into an unfinished one, with the new number of rounds and conditions to end.

        completed: rounds that are done. If the process is killed in here, the run counts as stopped.
        """
        finished = (self.path / "result.json").exists()
        parts = {name: self.config[name] for name in EXTENDED if name in self.config}
        if not finished and all(self.before.get(name) == value for name, value in parts.items()):
            return
        config = {**self.before, **parts}
        if isinstance(command := config.get("command"), dict):
            config["command"] = {**command, **length_flags(self.config)}
        if finished:
            config["extended"] = [*self.before.get("extended", []), completed]
        with writing(self.path):
            (self.path / "result.json").unlink(missing_ok=True)
            (self.path / CHECKSUMS).unlink(missing_ok=True)  # before the configuration changes
            shutil.rmtree(self.path / "models", ignore_errors=True)
            self._write_config(config)
        relocked = lock(self.path / "config.json")  # the file was replaced
        self.lock.close()
        self.lock, self.before = relocked, config

    def write(self, name: str, text: str) -> None:
        """Write a file atomically."""
        content = text.encode("utf-8", ODD)
        with whole(self.path / name) as part:
            part.write_bytes(content)
        self.sums[name] = Checksum.of(content)

    def _write_config(self, config: Mapping[str, Any]) -> None:
        self.write("config.json", json.dumps(config, indent=2, ensure_ascii=False) + "\n")

    def checksums(self) -> Callable[[], None]:
        """A function that writes the checksums of the folder as it is now, to be called later."""
        if self.behind:
            return lambda: None
        sums = self.sums | {name: table.checksum for name, table in self.tables.items()}
        return lambda: self._write_checksums(sums)

    def _write_checksums(self, sums: Mapping[str, Checksum], last: bool = False) -> None:
        with self.writing:
            if self.finished and not last:
                return
            self.finished = last
            for name in GROWING:
                sync(self.path / name)
            with whole(self.path / CHECKSUMS) as part:
                part.write_text(to_json(sums), encoding="utf-8")

    def _check_tables(self) -> None:
        """Warn about tables that were changed. A resumed run writes them again."""
        files = RunFiles(self.path)
        for name in GROWING:
            try:
                files.read(name)
            except FileNotFoundError:
                pass
            except Changed as error:
                log.warning("%s. It is written again from the checkpoint", error)

    def add(self, record: Round) -> None:
        """Add a round to the tables. If the disk is full, the run continues and writes them later."""
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

    def finish(self, result: TrainedFederation) -> None:
        """Write models and result.json, which comes last and marks the run as finished."""
        if bad := tree.not_finite(tree.flatten(result.server)):
            raise Diverged(f"the server's last state is not finite ({some_of(bad)}); no models are written")
        try:
            if self.behind:
                self._tables()
            write_models(self.path / "models", result, self.config["data"])
            self.sums[f"models/{SUMS}"] = Checksum.of(read_inside(self.path, f"models/{SUMS}"))
            self._reports(result)
            if result.finals:
                self._table("evaluation.csv", result.finals.rows())
                if result.finals.client_confusion is not None:
                    self._table("confusion.csv", result.finals.confusion_rows())
            text = json.dumps(summarise(result), indent=2) + "\n"
            tables = {name: table.checksum for name, table in self.tables.items()}
            self._write_checksums(self.sums | tables | {"result.json": Checksum.of(text.encode())}, last=True)
            self.write("result.json", text)
        except OSError as error:
            raise CoterieError(
                f"the run has ended, but {self.path} cannot be written to ({reason(error)}); once this is fixed, "
                f"`coterie resume {self.path}` continues from the last checkpoint"
            ) from None

    def close(self) -> None:
        logging.getLogger("coterie").removeHandler(self.log)
        self.log.close()
        self.lock.close()

    def remove(self) -> None:
        """Delete the folder of a run that failed before its first round ended."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _make(self) -> None:
        try:
            self.path.mkdir(parents=True)
            try:
                self._write_config(self.config)
            except OSError:
                self.path.rmdir()
                raise
        except FileExistsError:
            raise CoterieError(f"{self.path} exists already; name another folder") from None
        except OSError as error:
            raise CoterieError(f"cannot create the folder {self.path}: {error.strerror}") from None

    def _row(self, record: Round) -> list[Any]:
        row = measures(record)
        return [row.get(column, "") for column in self.columns]

    def _tables(self) -> None:
        self._table("metrics.csv", [self.columns, *map(self._row, self.records)])
        header = client_columns(metric_of(self.config))
        self._table("clients.csv", [header, *(row for record in self.records for row in client_rows(record))])

    def _table(self, name: str, rows: Iterable[list[Any]]) -> None:
        table = GrowingTable()
        with whole(self.path / name) as part, part.open("wb") as table.file:
            csv.writer(table).writerows(rows)
        if name in GROWING:
            self.tables[name] = table
        else:
            self.sums[name] = table.checksum

    def _append(self, name: str, rows: Iterable[list[Any]]) -> None:
        table = self.tables[name]
        with open_inside(self.path, name, "ab") as table.file:
            csv.writer(table).writerows(rows)

    def _reports(self, result: TrainedFederation) -> None:
        reported = {f"{name}/{r.number:05}": t.numpy() for r in result.history for name, t in r.report.items()}
        if reported:
            with whole(self.path / "reports.npz") as part, part.open("wb") as file:
                np.savez_compressed(file, allow_pickle=False, **reported)
            self.sums["reports.npz"] = Checksum.of(read_inside(self.path, "reports.npz"))


class LogFile(logging.FileHandler):
    """A log that ignores write errors; the terminal shows the same lines."""

    def _open(self) -> TextIOWrapper:
        path = Path(self.baseFilename)
        return TextIOWrapper(open_inside(path.parent, path.name, "ab"), self.encoding, self.errors)

    def handleError(self, record: logging.LogRecord) -> None:
        pass

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


def length_flags(config: Mapping[str, Any]) -> dict[str, Any]:
    """The flags of a command that set the length of a run."""
    return {"rounds": config["federation"]["rounds"], **config.get("ending", {})}
