"""CUDA graphs of all that a cohort does: recorded when its shapes have come back often enough, and replayed then.

To record the whole takes as long as to do it kernel by kernel, which pays only for shapes that keep coming back.
Until then the steps of training are recorded one at a time (coterie.core.replay).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.core import replay, tree

KEPT = 128  # graphs held at a time
PATIENCE = {"train": 8, "score": 8}  # times that a computation comes before the whole is recorded; all others: never


class Captured(NamedTuple):
    inputs: Any  # what a replay reads
    recorded: replay.Recorded


class Graphs:
    def __init__(self, recorder: replay.Recorder | None) -> None:
        self.recorder = recorder  # None: nothing can be recorded
        self.patience = dict(PATIENCE)
        if torch.are_deterministic_algorithms_enabled():  # a resumed run must not compute in another way
            del self.patience["train"]
        self.met: Counter[int] = Counter()  # by hash: there may be many
        self.captured: dict[Any, Captured] = {}  # the one used last stands last

    def run(self, task: str, name: str, body: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
        """body(*inputs). The task, a name and the shapes of the inputs say which computation this is."""
        if self.recorder is None:
            return body(*inputs)
        signature = (task, name, *((n, t.shape, t.dtype) for n, t in tree.items(inputs)))
        captured = self.captured.pop(signature, None)
        if captured is None:
            self.met[hash(signature)] += 1
            if self.met[hash(signature)] < self.patience.get(task, math.inf):
                with replay.recording(self.recorder):
                    return body(*inputs)
            captured = self._capture(self.recorder, body, inputs)
        self.captured[signature] = captured
        return replayed(captured, inputs)

    def _capture(self, recorder: replay.Recorder, body: Callable[..., Any], inputs: tuple[Any, ...]) -> Captured:
        while len(self.captured) >= KEPT:
            oldest = next(iter(self.captured))
            del self.captured[oldest], self.met[hash(oldest)]  # it has to prove itself anew
        torch.cuda.empty_cache()  # of what was computed kernel by kernel
        held = tree.apply(Tensor.clone, inputs)
        return Captured(held, recorder.record(lambda: body(*held)))


def replayed(captured: Captured, inputs: tuple[Any, ...]) -> Any:
    tree.apply(Tensor.copy_, captured.inputs, inputs)
    captured.recorded.replay()
    return tree.apply(Tensor.clone, captured.recorded.written)
