"""Seconds by phase of a round, on a CPU or a GPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class PhaseTimer:
    """Seconds by phase. On a GPU, from CUDA events, without synchronizing."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.spans: list[tuple[str, Any, Any]] = []  # phase, start, end

    @contextmanager
    def time(self, phase: str) -> Iterator[None]:
        start = self.now()
        yield
        self.spans.append((phase, start, self.now()))

    def now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def between(self, start: Any, end: Any) -> float:
        if self.device.type != "cuda":
            return float(end - start)
        end.synchronize()  # the event is complete at the end of a round
        return float(start.elapsed_time(end)) / 1000

    @property
    def seconds(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for phase, start, end in self.spans:
            found[phase] = found.get(phase, 0.0) + self.between(start, end)
        return found
