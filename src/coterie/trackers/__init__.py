"""Tools that people follow their runs with. They look on: no result depends on them, and none can end a run."""

from __future__ import annotations

from collections.abc import Sequence

from coterie.core.errors import CoterieError, unknown
from coterie.trackers.mlflow import MLflow
from coterie.trackers.tensorboard import TensorBoard
from coterie.trackers.tracker import Tracker, Tracking
from coterie.trackers.wandb import WandB

__all__ = ["TRACKERS", "Tracker", "Tracking", "make_trackers"]

TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


def make_trackers(track: str | Sequence[str]) -> list[Tracker]:
    """By their names, such as "tensorboard,mlflow". An error if the package of one is not installed."""
    names = track.split(",") if isinstance(track, str) else track
    made = []
    for name in dict.fromkeys(word.strip() for word in names):
        if name not in TRACKERS:
            raise unknown("tracker", name, TRACKERS)
        try:
            made.append(TRACKERS[name]())
        except ImportError as error:
            raise CoterieError(
                f"tracking with {TRACKERS[name].title} needs a package that is not here ({error}): "
                f"pip install 'coterie[{name}]'"
            ) from None
    return made
