"""What cohorts do on a GPU: recorded when it comes for the first time, and replayed when the same shapes come back."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from coterie.core import tree
from coterie.core.replay import Recorded, Recorder

KEPT = 256  # recordings held at a time: clients of unlike size come in a hundred shapes


class Captured(NamedTuple):
    inputs: Any  # what a replay reads
    recorded: Recorded

    @property
    def size(self) -> int:
        return tree.size(self.inputs) + tree.size(self.recorded.written)


class Graphs:
    def __init__(self, recorder: Recorder | None, room: float = math.inf) -> None:
        self.recorder = recorder  # None: nothing can be recorded
        self.room = room  # bytes that recordings read and write, about
        self.captured: dict[Any, Captured] = {}  # the one used last stands last

    def run(self, name: str, body: Callable[..., Any], inputs: Any) -> Any:
        """body(*inputs). The name and the shapes of the inputs say which computation this is; it depends on no more."""
        if self.recorder is None:
            return body(*inputs)
        signature = (name, *((n, t.shape, t.dtype) for n, t in tree.items(inputs)))
        captured = self.captured.pop(signature, None) or self._capture(self.recorder, body, inputs)
        self.captured[signature] = captured
        tree.apply(Tensor.copy_, captured.inputs, inputs)
        captured.recorded.replay()
        return tree.apply(Tensor.clone, captured.recorded.written)

    def _capture(self, recorder: Recorder, body: Callable[..., Any], inputs: Any) -> Captured:
        while len(self.captured) >= KEPT or sum(c.size for c in self.captured.values()) > self.room:
            del self.captured[next(iter(self.captured))]
        held = tree.apply(Tensor.clone, inputs)
        return Captured(held, recorder.record(lambda: body(*held)))
