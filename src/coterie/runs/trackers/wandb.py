"""Weights & Biases: offline, in RUN/wandb, unless the user sets WANDB_MODE and WANDB_DIR. `wandb sync` uploads it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from coterie.runs.disk import subfolder
from coterie.runs.trackers.tracker import Tracker, Values

QUIET = {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}  # unless the user says otherwise
RESERVED: dict[str, Any] = {  # record nothing about the machine, the user or the code; print nothing
    "silent": True,
    "console": "off",
    "disable_git": True,
    "disable_code": True,
    "disable_job_creation": True,
    "save_code": False,
    "symlink": False,
    "x_disable_stats": True,
    "x_disable_meta": True,
    "x_disable_machine_info": True,
    "x_save_requirements": False,
    "x_transaction_log_flush_interval": 0.1,  # seconds that a killed run may lose
}


class WandB(Tracker):
    title: ClassVar[str] = "W&B"

    def __init__(self) -> None:
        super().__init__()
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        import wandb

        self.wandb = wandb
        self.run: Any = None

    def open(self, folder: Path, config: Mapping[str, Any], mark: str | None, rounds: int) -> str:
        mark = mark or secrets.token_hex(4)
        subfolder(folder, "wandb")
        known = self.wandb.Settings()
        self.run = self.wandb.init(
            id=mark,
            name=folder.resolve().name,
            project=os.environ.get("WANDB_PROJECT") or "coterie",
            dir=None if os.environ.get("WANDB_DIR") else str(folder),
            mode=None if os.environ.get("WANDB_MODE") else "offline",
            resume=None if self._offline else "allow",  # offline, equal ids make one run
            reinit="create_new",  # do not touch a run of the user
            config=dict(config),
            settings=self.wandb.Settings(**{name: value for name, value in RESERVED.items() if hasattr(known, name)}),
        )
        for link in filter(Path.is_symlink, Path(self.run.dir).parent.rglob("*")):  # to W&B's own log
            link.unlink()  # run folders with links are refused
        self.run.define_metric("round")
        self.run.define_metric("*", step_metric="round")
        return mark

    def log(self, step: int, values: Values) -> None:
        self.run.log({"round": step, **values})  # W&B's own step may not decrease, but rounds may repeat

    def keep(self, files: Sequence[Path]) -> None:
        artifact = self.wandb.Artifact(f"run-{self.run.id}", type="run")
        for path in files:  # not copied: `wandb sync` reads them where they are
            artifact.add_file(str(path), policy="immutable", skip_cache=True)
        self.run.log_artifact(artifact)

    def close(self, step: int, outcome: Values | None) -> None:
        if self.run:
            self.run.summary.update(dict(outcome or {}))
            self.run.finish(exit_code=0 if outcome else 1)

    @property
    def _offline(self) -> bool:
        return os.environ.get("WANDB_MODE", "offline") in ("offline", "dryrun", "disabled")
