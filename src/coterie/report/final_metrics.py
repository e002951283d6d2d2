"""What result.json holds of every metric after the last round, and to which reported number it belongs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coterie.core.errors import CoterieError
from coterie.core.metric_scale import MetricScale
from coterie.federation.finals import reported_model
from coterie.runs.stored_run import StoredRun

Numbers = Mapping[str, Mapping[str, Mapping[str, Any]]]


def numbers_of(run: StoredRun) -> Numbers:
    """Model -> metric -> mean and worst10, as far as result.json has them."""
    found = (run.result or {}).get("metrics")
    models = found if isinstance(found, dict) else {}
    return {
        str(model): {str(name): value for name, value in metrics.items() if isinstance(value, dict)}
        for model, metrics in models.items()
        if isinstance(metrics, dict)
    }


def model_of(run: StoredRun, point: str) -> str | None:
    """The model whose metrics belong to the number that the run reports at this point."""
    curve = run.curve(point)
    score = curve[-1][1] / run.metric.factor if curve else float("nan")
    return reported_model(numbers_of(run), run.metric.name, point, score, bool(run.curve("finished")))


def scales_of(run: StoredRun, names: Sequence[str]) -> dict[str, MetricScale]:
    """The scale of each metric; of a task whose code is not loaded, values as they are."""
    try:
        known = {metric.name: metric.scale for metric in run.task.metrics}
    except (CoterieError, KeyError, TypeError, ValueError):  # code that is not loaded, or a damaged config.json
        known = {}
    return {name: known.get(name, MetricScale(name, share=False, counts=False)) for name in names}
