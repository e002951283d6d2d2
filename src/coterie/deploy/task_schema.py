"""The task of a federation, as devices announce it and the server's terms repeat it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from coterie.core.data import FederatedData
from coterie.core.errors import CoterieError
from coterie.core.importing import is_code
from coterie.core.task import Task
from coterie.core.tasks import TASKS
from coterie.deploy.wire import Refused, readable
from coterie.runs.describe import described_task

MAX_OPTION = 2**17  # the largest number of an option, and the largest number of values
MAX_LABEL = 2**24  # values of a label
MOMENTS = ("mean", "std")  # options of a standardized task


@dataclass(frozen=True)
class TaskSchema:
    """What labels are for: enough to make an equal task."""

    kind: str  # name of the task, or package.module:Class
    options: dict[str, Any]  # of its constructor, except mean and std
    label_shape: tuple[int, ...]
    mean: tuple[float, ...] = ()  # of the training labels, for tasks that standardize them
    std: tuple[float, ...] = ()

    @staticmethod
    def of(data: FederatedData) -> TaskSchema:
        """Mean and standard deviation are exact where the task was fitted to these labels: 0 for a constant."""
        task, about = data.task, described_task(data.task)
        kept = {name: value for name, value in task.options.items() if not task.standardized or name not in MOMENTS}
        options = json.loads(json.dumps(kept))  # as the other side reads them
        if not task.standardized:
            return TaskSchema(about["class"], options, data.label_shape)
        y = data.train.y.double()
        exact = {"mean": y.mean(0).tolist(), "std": y.std(0, correction=0).tolist()}
        used = exact if task.having(**exact).options == task.options else task.options
        return TaskSchema(about["class"], options, data.label_shape, tuple(used["mean"]), tuple(used["std"]))

    def made(self, own: type[Task] | None = None) -> Task:
        """The task. own: a class outside Coterie that the user of this machine has named. Raises `CoterieError`."""
        named = None if own is None else f"{own.__module__}:{own.__qualname__}"
        if self.kind not in TASKS and self.kind != named:
            found = f"but --task is {named}" if named else "install its code on this machine and name it with --task"
            raise CoterieError(f"the devices train for the task {readable(self.kind[:200])}; {found}")
        kind: Any = TASKS.get(self.kind) or own
        moments = {"mean": list(self.mean), "std": list(self.std)} if kind.standardized else {}
        try:
            made: Task = kind(**self.options, **moments)
        except (TypeError, ValueError, RuntimeError) as error:
            raise CoterieError(f"invalid options of the task {kind.name}: {readable(str(error))}") from None
        return made


def check_task(schema: TaskSchema, classes: int, own: type[Task] | None = None) -> None:
    """Raise `Refused` unless such a task can be made here. classes: as announced. own: a class that is allowed."""
    if not (schema.kind in TASKS or is_code(schema.kind)):
        raise Refused(f"unknown task '{readable(schema.kind[:80])}'")
    if not all(map(bounded, schema.options.values())):
        raise Refused("an option of the task is too large, or not a plain value")
    sides = schema.label_shape
    if len(sides) > 4 or min(sides, default=1) < 1 or math.prod(sides) > MAX_LABEL:
        raise Refused(f"unsupported: labels of shape {sides}")
    if len(schema.mean) != len(schema.std) or not all(value >= 0 for value in schema.std):
        raise Refused("invalid mean and standard deviation of the labels")
    try:
        task = schema.made(own)
    except CoterieError as error:
        raise Refused(str(error)) from None
    if classes != (task.classes if task.one_class else 0):
        raise Refused(f"{classes} classes, but the task is {task.described()}")
    if not is_code(schema.kind) and not 1 <= task.width <= MAX_OPTION:
        raise Refused(f"unsupported: {task.described()}")


def bounded(value: Any) -> bool:
    """Whether an option is a plain value of reasonable size."""
    if isinstance(value, list):
        return len(value) <= MAX_OPTION and all(not isinstance(part, list | dict) and bounded(part) for part in value)
    if isinstance(value, str):
        return len(value) <= 1000 and value.isprintable()
    return value is None or (isinstance(value, bool | int | float) and abs(value) <= MAX_OPTION)


def task_difference(one: str, a: TaskSchema, other: str, b: TaskSchema) -> str | None:
    """Describe the first difference between two tasks; mean and standard deviation may differ, they are pooled."""
    if a.kind != b.kind:
        return f"{one} trains for {a.kind}, {other} for {b.kind}; use the same --task on all devices"
    for name in sorted(a.options.keys() | b.options.keys()):
        ours, theirs = (str(side.options.get(name, "not set")) for side in (a, b))
        if ours != theirs:
            what = "--metric" if name == "metric" else f"--task-args {name}=..."
            return (
                f"the task {a.kind} has {name} {ours[:80]} on {one} and {theirs[:80]} on {other}; pass the same {what} "
                "on all devices"
            )
    if a.label_shape != b.label_shape or len(a.mean) != len(b.mean):
        return f"{one} has labels of shape {a.label_shape}, {other} of shape {b.label_shape}; they must be the same"
    return None
