"""Experiment trackers. Results do not depend on them, and a failing tracker does not end a run."""

from __future__ import annotations

from collections.abc import Sequence

from coterie.core.errors import CoterieError, unknown
from coterie.runs.trackers.mlflow import MLflow
from coterie.runs.trackers.tensorboard import TensorBoard
from coterie.runs.trackers.tracker import Tracker, Tracking
from coterie.runs.trackers.wandb import WandB

__all__ = ["TRACKERS", "Tracker", "Tracking", "make_trackers"]

TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


def make_trackers(track: str | Sequence[str]) -> list[Tracker]:
    """Trackers by name, such as "tensorboard,mlflow". A package that is not installed is an error."""
    names = track.split(",") if isinstance(track, str) else track
    made = []
    for name in dict.fromkeys(word.strip() for word in names):
        if name not in TRACKERS:
            raise unknown("tracker", name, TRACKERS)
        try:
            made.append(TRACKERS[name]())
        except ImportError as error:
            raise CoterieError(
                f"tracking with {TRACKERS[name].title} needs a package that is not installed ({error}): "
                f"pip install 'coterie[{name}]'"
            ) from None
    return made
