"""A finished run, opened from its folder."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from torch import nn

from coterie.api.finished_run import FinishedRun, Row
from coterie.core.errors import CoterieError
from coterie.core.method import AnyMethod
from coterie.core.task import Task
from coterie.federation.finals import PERSONAL
from coterie.runs.config import check_config, read_config
from coterie.runs.copying import copy_run
from coterie.runs.finding import is_started, started_in
from coterie.runs.stored_run import StoredRun

TEXT, WHOLE = "left_out", ("round", "participants", "bytes_up", "bytes_down")  # columns of metrics.csv


class Run(StoredRun, FinishedRun):
    """A finished run, read from its folder, which `coterie.load_run` opens. The dataset is not needed.

    It has the tables and methods of a `Result`, but not the clients' samples. `scores`, `metrics` and `clients` are
    pandas DataFrames where pandas is installed, else lists of dicts; shares have the six digits of the files.

    >>> run = coterie.load_run("runs/hospitals")  # doctest: +SKIP
    >>> run.clients, run.personal_model("basel")  # doctest: +SKIP
    """

    def save(self, path: str | Path) -> Path:
        """Copy the folder, and verify the copy. Returns its path."""
        return copy_run(self.folder, Path(path))

    def _data_name(self) -> str | None:
        return str(self.section("data")["name"])

    def _clients(self) -> list[Row]:
        members, sizes = self.members, self.section("data")["test_sizes"]
        if len(sizes) != len(members):
            raise self.files.damaged("config.json", f"{len(sizes)} test_sizes for {len(members)} clients")
        return [
            {
                "client": client.number,
                "name": client.name,
                "train_samples": client.samples,
                "test_samples": tested,
                "classes": client.classes,
            }
            for client, tested in zip(members, sizes, strict=True)
        ]

    def _finals(self) -> dict[str, dict[int, float]]:
        measured = ((self.result or {}).get("metrics") or {}).get(PERSONAL, ())
        values = self.client_metrics.get(PERSONAL, {})
        return {name: {client: own.get(name, math.nan) for client, own in values.items()} for name in measured}

    def _measures(self) -> list[Row]:
        def value(column: str, text: str) -> Any:
            return text if column == TEXT else int(text) if column in WHOLE else float(text)

        rows = self.metrics_table.rows
        return [{name: value(name, text) for name, text in row.items() if text or name == TEXT} for row in rows]


def load_run(
    path: str | Path,
    model: str | nn.Module | None = None,
    trust_code: bool = False,
    method: str | type[AnyMethod] | None = None,
    task: str | type[Task] | None = None,
) -> Run:
    """Open a finished run by its folder. The result has the tables and methods of what `coterie.run` returns.

    model: the network, if it is not built in: an object, or an import path package.module:Class. Only models need it.
    trust_code: import whatever code config.json names. Only for folders that you trust as you trust that code.
    method, task: the class of each or its import path, if it is not built in.

    >>> model = coterie.load_run("runs/hospitals").personal_model("basel")  # doctest: +SKIP
    """
    path = Path(path)
    if not path.is_dir():
        raise CoterieError(f"{path}: no such folder")
    if not is_started(path):
        inner = started_in(path)
        hint = f"; it holds several runs, name one of them: {', '.join(p.name for p in inner)}" if inner else ""
        raise CoterieError(f"{path} is not a run folder{hint}")
    config, run = read_config(path), Run(path, model, trust_code, method, task)
    check_config(path, config)
    if "deployment" in config and "ids" not in config["data"]:
        raise CoterieError(
            f"{path} is the folder of a federation's server; its devices have the models, each in its own run folder"
        )
    if not run.files.finished:
        raise CoterieError(
            f"{path}: this run is not finished, it has {min(len(run.rounds), run.planned)} of {run.planned} rounds; "
            f"its clients have no models yet. `coterie resume {path}` continues it"
        )
    run.files.verify()
    return run
