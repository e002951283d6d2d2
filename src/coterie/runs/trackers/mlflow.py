"""MLflow: files in RUN/mlruns, or at the user's MLFLOW_TRACKING_URI."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from coterie.core.printable import shortened
from coterie.federation import History
from coterie.runs.disk import subfolder
from coterie.runs.matching import dotted
from coterie.runs.trackers.tracker import Tracker, Values

QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}  # unless the user says otherwise
LONGEST = 500  # characters of a parameter that every version of MLflow accepts
MOST = 100  # parameters per request


class MLflow(Tracker):
    title: ClassVar[str] = "MLflow"

    def __init__(self) -> None:
        super().__init__()
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        import mlflow

        self.mlflow, self.mark = mlflow, ""

    def open(self, folder: Path, config: Mapping[str, Any], mark: str | None, rounds: int) -> str:
        where = os.environ.get("MLFLOW_TRACKING_URI")
        if not where:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # a database needs more than mlflow-skinny
            where = subfolder(folder, "mlruns").resolve().as_uri()
        self.client = self.mlflow.MlflowClient(tracking_uri=where)
        if mark:
            self.client.update_run(mark, status="RUNNING")
            self.mark = mark
            return mark
        self.mark = self.client.create_run(self._experiment(), run_name=folder.resolve().name).info.run_id
        parameters = [self.mlflow.entities.Param(name, parameter(value)) for name, value in dotted(config)]
        for start in range(0, len(parameters), MOST):
            self.client.log_batch(self.mark, params=parameters[start : start + MOST])
        return self.mark

    def logged(self, history: History) -> dict[str, int]:
        """Read from the server: repeated rounds have equal values."""
        names = self.client.get_run(self.mark).data.metrics
        return {name: max(m.step for m in self.client.get_metric_history(self.mark, name)) for name in names}

    def log(self, step: int, values: Values) -> None:
        now = int(1000 * time.time())
        made = [self.mlflow.entities.Metric(name, value, now, step) for name, value in values.items()]
        self.client.log_batch(self.mark, metrics=made)

    def keep(self, files: Sequence[Path]) -> None:
        for path in files:
            self.client.log_artifact(self.mark, str(path))

    def close(self, step: int, outcome: Values | None) -> None:
        if self.mark:
            if outcome:
                self.log(step, outcome)
            self.client.set_terminated(self.mark, "FINISHED" if outcome else "KILLED")

    def _experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "coterie"
        found = self.client.get_experiment_by_name(name)
        return str(found.experiment_id if found else self.client.create_experiment(name))


def parameter(value: Any) -> str:
    return shortened(value if isinstance(value, str) else json.dumps(value), LONGEST)
