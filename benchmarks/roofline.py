"""How fast a step could be: its operations and bytes, against what the machine was measured to do.

Bytes are those of a computation layer by layer: weights, gradients and momentum are read and written once a step, the
input is read once, what each layer gives is written once and read twice, in the forward and in the backward pass. A
kernel that fuses layers can be below this.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.machine import synchronize
from benchmarks.neighbour import Neighbour, serve
from coterie.execution.looped import cores

Peaks = dict[str, float]  # "bandwidth": bytes a second; "fp32", "tf32", "bf16": operations a second


class Work(NamedTuple):
    operations: float
    bytes: float


def step_work(net: nn.Module, x: Tensor, y: Tensor, momentum: bool) -> Work:
    """Of one SGD step of one client on a batch x (B, ...), which is stored as bytes."""
    written = 0

    def note(layer: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> None:
        nonlocal written
        if out.data_ptr() != given[0].data_ptr():  # a view moves nothing
            written += out.numel() * out.element_size()

    hooks = [m.register_forward_hook(note) for m in net.modules() if not list(m.children())]
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(net(x), y).backward()  # type: ignore[no-untyped-call]
    for hook in hooks:
        hook.remove()
    weights = sum(p.numel() * p.element_size() for p in net.parameters())
    return Work(counter.get_total_flops(), (6 if momentum else 4) * weights + x.numel() + 3 * written)


def floors(work: Work, peaks: Peaks) -> dict[str, float]:
    """Seconds that the work takes at least, by the precision of its products."""
    moving = work.bytes / peaks["bandwidth"]
    return {name: max(work.operations / rate, moving) for name, rate in peaks.items() if name != "bandwidth"}


def peaks(device: str, quick: bool = False) -> Peaks:
    """Measured now: on a GPU alone, on a CPU in one process for each core at the same time, added up.

    quick: one process, and not for long.
    """
    seconds, count = ("0.05", 1) if quick else ("0.5", cores() if device == "cpu" else 1)
    with ExitStack() as stack:
        others = [stack.enter_context(Neighbour("roofline", device, seconds)) for _ in range(count)]
        for other in others:
            other.ask()
        answers = [other.answer() for other in others]
    return {name: sum(a[name] for a in answers) for name in answers[0]}


def rates(device: str, seconds: float) -> Peaks:
    """Of this process, one thread."""
    side, length = (1024, 2**25) if device == "cpu" else (8192, 2**28)  # numbers
    source, target = torch.ones(length, device=device), torch.zeros(length, device=device)
    clock = time.process_time if device == "cpu" else time.perf_counter  # whatever else the cores are doing
    found = {"bandwidth": 2 * 4 * length / quickest(lambda: target.copy_(source), seconds, clock)}
    a = torch.randn(side, side, device=device)
    operations = 2 * side**3
    precisions: dict[str, tuple[str, Tensor]] = {"fp32": ("highest", a)}
    if device != "cpu":
        precisions |= {"tf32": ("high", a), "bf16": ("highest", a.bfloat16())}
    for name, (precision, factor) in precisions.items():
        torch.set_float32_matmul_precision(precision)
        found[name] = operations / quickest(lambda factor=factor: factor @ factor, seconds, clock)  # type: ignore[misc]
    return found


def quickest(work: Callable[[], Any], seconds: float, clock: Callable[[], float]) -> float:
    """The shortest time of many."""
    work()
    best, begun = float("inf"), clock()
    while clock() - begun < seconds:
        synchronize()
        start = clock()
        work()
        synchronize()
        best = min(best, clock() - start)
    return best


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(lambda: rates(sys.argv[1], float(sys.argv[2])))
