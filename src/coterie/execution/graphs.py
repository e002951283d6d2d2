"""Recordings of what cohorts compute on a GPU, by shape: recorded at the first call, replayed afterwards."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from coterie.core import tree
from coterie.gpu.recording import GraphRecorder, Recorded

KEPT = 256  # recordings at a time: clients of different sizes come in about a hundred shapes


class Captured(NamedTuple):
    inputs: Any  # tensors that a replay reads
    recorded: Recorded

    @property
    def size(self) -> int:
        return tree.size(self.inputs) + tree.size(self.recorded.written)


class Graphs:
    """A cache of recordings; the least recently used one is dropped first."""

    def __init__(self, recorder: GraphRecorder | None, room: float = math.inf) -> None:
        self.recorder = recorder  # None: compute without recording
        self.room = room  # approximate limit on the bytes that recordings read and write
        self.captured: dict[Any, Captured] = {}  # ordered by last use

    def run(self, name: str, body: Callable[..., Any], inputs: Any) -> Any:
        """body(*inputs), where the computation depends only on the name and on the shapes and dtypes of the inputs."""
        if self.recorder is None:
            return body(*inputs)
        signature = (name, *((n, t.shape, t.dtype) for n, t in tree.items(inputs)))
        captured = self.captured.pop(signature, None) or self._capture(self.recorder, body, inputs)
        self.captured[signature] = captured
        tree.apply(Tensor.copy_, captured.inputs, inputs)
        captured.recorded.replay()
        return tree.apply(Tensor.clone, captured.recorded.written)

    def _capture(self, recorder: GraphRecorder, body: Callable[..., Any], inputs: Any) -> Captured:
        while len(self.captured) >= KEPT or sum(c.size for c in self.captured.values()) > self.room:
            del self.captured[next(iter(self.captured))]
        held = tree.apply(Tensor.clone, inputs)
        return Captured(held, recorder.record(lambda: body(*held)))
