"""What CUDA graphs do, on a CPU: a tape of operations stands for a graph of kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from coterie.core import replay


class Tape(TorchDispatchMode):
    """Operations and the tensors they read and write: like a graph, it knows places in memory, and no Python."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[Any, Any, Any, Any]] = []  # of the part that is being recorded
        self.before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            self.before += [(t, t.clone()) for t in tree_leaves(args) if isinstance(t, Tensor)]
        made = func(*args, **(kwargs or {}))
        self.lines.append((func, args, kwargs or {}, made))
        return made

    def rewind(self) -> None:
        """To record is not to do."""
        for tensor, value in reversed(self.before):
            if tensor.shape == value.shape:  # else only its form was changed
                tensor.copy_(value)


class Recorder(replay.Recorder):
    def __init__(self) -> None:
        self.recorded = self.replayed = 0  # steps

    @contextmanager
    def listening(self) -> Iterator[None]:
        with Tape() as self.tape:
            yield
        self.tape.rewind()

    def begin(self, kind: int) -> None:
        self.kind, self.tape.lines = kind, []

    def end(self) -> replay.Replay:
        lines, step = self.tape.lines, self.kind == replay.STEP
        self.recorded += step

        def again() -> None:
            self.replayed += step
            for func, args, kwargs, made in lines:
                found = func(*args, **kwargs)
                for place, value in zip(tree_leaves(made), tree_leaves(found), strict=True):
                    if isinstance(place, Tensor) and place.data_ptr() != value.data_ptr():
                        place.copy_(value)

        return again
