"""Which devices run Triton kernels, and where a kernel is launched."""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager, nullcontext

import torch


def runs_triton(device: torch.device) -> bool:
    """Whether Triton kernels run on this device."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def selected(device: torch.device) -> AbstractContextManager[object]:
    """Make this GPU the current one: Triton launches its kernels there. No effect for a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
