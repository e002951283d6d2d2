"""Settings of the whole process: torch's threads, and the allocator of the C library."""

from __future__ import annotations

import ctypes
import sys

import torch

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # mallopt's numbers of parameters


def one_thread() -> None:
    """Use one thread, and keep freed memory."""
    torch.set_num_threads(1)
    keep_freed_memory()


def keep_freed_memory() -> None:
    """Let the allocator keep freed memory instead of returning it to the system after every step."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt:  # glibc
        mallopt(TRIM_THRESHOLD, 2**31 - 1)
        mallopt(MMAP_THRESHOLD, 2**30)
