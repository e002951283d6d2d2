"""CUDA graphs on a CPU: a log of torch operations stands for a graph of kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from coterie.gpu import recording


class OperationLog(TorchDispatchMode):
    """Operations and the tensors they read and write. Like a graph, it holds memory locations and no Python code."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[Any, Any, Any, Any]] = []  # of the part in progress
        self.before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            self.before += [(t, t.clone()) for t in tree_leaves(args) if isinstance(t, Tensor)]
        made = func(*args, **(kwargs or {}))
        if torch.Tag.inplace_view not in func.tags:  # they write nothing
            self.lines.append((func, args, kwargs or {}, made))
        return made

    def rewind(self) -> None:
        """Undo in-place changes: recording must not execute."""
        for tensor, value in reversed(self.before):
            if tensor.shape == value.shape:  # otherwise only its shape was changed
                tensor.copy_(value)


class FakeGraphs(recording.GraphRecorder):
    def __init__(self) -> None:
        self.recorded = self.replayed = 0  # steps

    @contextmanager
    def listening(self) -> Iterator[None]:
        with OperationLog() as self.log:
            yield
        self.log.rewind()

    def begin(self, kind: int) -> None:
        self.kind, self.log.lines = kind, []

    def end(self) -> recording.Replay:
        lines, step = self.log.lines, self.kind == recording.STEP
        self.recorded += step

        @torch.no_grad()
        def again() -> None:
            self.replayed += step
            for func, args, kwargs, made in lines:
                found = func(*args, **kwargs)
                for place, value in zip(tree_leaves(made), tree_leaves(found), strict=True):
                    if isinstance(place, Tensor) and place.data_ptr() != value.data_ptr():
                        place.copy_(value.reshape(place.shape))

        return again
