"""Roofline: a lower bound on the time of a step from its operations and bytes and the measured rates of the machine.

Bytes are counted layer by layer: weights, gradients and momentum are read and written once per step, the input is read
once, and the output of each layer is written once and read twice, in the forward and in the backward pass. A kernel
that fuses layers can be below this bound.
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

Peaks = dict[str, float]  # "bandwidth": bytes per second; "fp32", "tf32", "bf16": operations per second


class Work(NamedTuple):
    operations: float
    bytes: float


def step_work(net: nn.Module, x: Tensor, y: Tensor, momentum: bool) -> Work:
    """Work of one SGD step of one client on a batch x (B, ...), which is stored as bytes."""
    written = recurrent = 0

    def note(layer: nn.Module, given: tuple[Tensor, ...], out: Tensor | tuple[Tensor, ...]) -> None:
        nonlocal written, recurrent
        out = out[0] if isinstance(out, tuple) else out  # of a recurrent layer: its outputs
        if isinstance(layer, nn.RNNBase):  # torch does not count it: every position multiplies every matrix
            sizes = {name: p.numel() for name, p in layer.named_parameters() if p.ndim > 1}
            first = 0 if given[0].requires_grad else sum(n for name, n in sizes.items() if "ih_l0" in name)
            recurrent += 2 * (3 * sum(sizes.values()) - first) * (out.numel() // out.shape[-1])  # forward, 2 gradients
        if out.data_ptr() != given[0].data_ptr():  # a view moves nothing
            written += out.numel() * out.element_size()

    hooks = [m.register_forward_hook(note) for m in net.modules() if not list(m.children())]
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(net(x).movedim(-1, 1), y).backward()  # type: ignore[no-untyped-call]
    for hook in hooks:
        hook.remove()
    trained, frozen = (
        sum(p.numel() * p.element_size() for p in net.parameters() if p.requires_grad is kind) for kind in (True, False)
    )
    moved = (6 if momentum else 4) * trained + 2 * frozen  # frozen weights are read in both passes
    return Work(counter.get_total_flops() + recurrent, moved + x.numel() + 3 * written)


def floors(work: Work, peaks: Peaks) -> dict[str, float]:
    """Lower bounds in seconds, by precision of the matrix products."""
    moving = work.bytes / peaks["bandwidth"]
    return {name: max(work.operations / rate, moving) for name, rate in peaks.items() if name != "bandwidth"}


def peaks(device: str, quick: bool = False) -> Peaks:
    """Measure the rates: on a GPU in one process, on a CPU as the sum over one process per core, at the same time.

    quick: one process, for a short time.
    """
    seconds, count = ("0.05", 1) if quick else ("0.5", cores() if device == "cpu" else 1)
    with ExitStack() as stack:
        others = [stack.enter_context(Neighbour("roofline", device, seconds)) for _ in range(count)]
        for other in others:
            other.ask()
        answers = [other.answer() for other in others]
    return {name: sum(a[name] for a in answers) for name in answers[0]}


def rates(device: str, seconds: float) -> Peaks:
    """Rates of this process, with one thread."""
    side, length = (1024, 2**25) if device == "cpu" else (8192, 2**28)  # numbers
    source, target = torch.ones(length, device=device), torch.zeros(length, device=device)
    clock = time.process_time if device == "cpu" else time.perf_counter  # not affected by other load
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
    """Shortest time of repeated calls."""
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
