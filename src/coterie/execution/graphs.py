"""Recordings of what clients compute on a GPU, by shape: recorded at the first call, replayed afterwards."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from torch import Tensor

from coterie.core import tree
from coterie.gpu.recording import GraphRecorder, Recorded

log = logging.getLogger("coterie")

KEPT = 256  # recordings at a time: clients of different sizes come in about a hundred shapes


class Captured(NamedTuple):
    inputs: Any  # tensors that a replay reads
    recorded: Recorded

    @property
    def size(self) -> int:
        return tree.size(self.inputs) + tree.size(self.recorded.written)


class Graphs:
    """A cache of recordings; the least recently used one is dropped first.

    shared: recordings read their inputs from the same tensors, and write their outputs to the same ones, wherever name,
    shape and dtype are equal. It saves memory where recordings differ in few inputs, at the cost of a copy.
    """

    def __init__(self, recorder: GraphRecorder | None, room: float = math.inf, shared: bool = False) -> None:
        self.recorder = recorder  # None: compute without recording
        self.room = room  # approximate limit on the bytes that recordings read and write
        self.captured: dict[Any, Captured] = {}  # ordered by last use
        self.places: WeakValueDictionary[Any, Tensor] | None = WeakValueDictionary() if shared else None

    def run(self, name: str, body: Callable[..., Any], inputs: Any) -> Any:
        """body(*inputs), where the computation depends only on the name and on the shapes and dtypes of the inputs."""
        parts = self.parts(name, body, inputs)
        while True:
            try:
                next(parts)
            except StopIteration as end:
                return end.value

    def parts(self, name: str, body: Callable[..., Any], inputs: Any) -> Generator[None, None, Any]:
        """`run` part by part: several may be under way at a time, each with a recorder of its own."""
        if self.recorder is None:
            return body(*inputs)
        signature = self.signature(name, inputs)
        captured = self.captured.pop(signature, None) or self._capture(self.recorder, body, inputs)
        self.captured[signature] = captured
        tree.copy(captured.inputs, inputs)
        for part in captured.recorded.parts:
            part()
            yield
        return tree.copied(captured.recorded.written)

    def signature(self, name: str, inputs: Any) -> Any:
        return (name, *((n, t.shape, t.dtype) for n, t in tree.items(inputs)))

    def _capture(self, recorder: GraphRecorder, body: Callable[..., Any], inputs: Any) -> Captured:
        while self.captured and (len(self.captured) >= KEPT or self._size() > self.room):
            del self.captured[next(iter(self.captured))]
        if self.places is None:
            held = tree.apply(Tensor.clone, inputs)
            return Captured(held, recorder.record(lambda: body(*held)))
        held = self._placed("read", inputs)
        return Captured(held, recorder.record(lambda: self._written(body(*held))))

    def _size(self) -> int:
        if self.places is None:
            return sum(c.size for c in self.captured.values())
        return tree.size(dict(enumerate(self.places.values())))

    def _written(self, made: Any) -> Any:
        places = self._placed("written", made)
        tree.copy(places, made)
        return places

    def _placed(self, kind: str, given: Any) -> Any:
        """The shared tensors in which recordings keep values of these names, shapes and dtypes."""
        assert self.places is not None
        found = {}
        for name, t in tree.items(given):
            key = (kind, name, t.shape, t.dtype)
            place = self.places.get(key)
            if place is None:
                self.places[key] = place = t.clone()
            found[name] = place
        return tree.fill(given, found)


def unrecorded(error: Exception) -> Graphs:
    """Compute without recordings from now on, after a warning with the reason."""
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    log.warning("clients are computed without CUDA graphs, because they cannot be recorded: %s", reason)
    return Graphs(None)
