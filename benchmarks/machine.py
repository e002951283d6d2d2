"""The machine: provenance, memory use, CPU time and synchronization."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from coterie.execution.looped import cores

GB = 1e9


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def forget_peak() -> None:
    """Release free memory and reset the peak."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim:  # glibc; looped clients configure it to keep free memory
        trim(0)
    with contextlib.suppress(OSError):  # not Linux, or not permitted: then the peak is that of the whole process
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_memory(device: str) -> dict[str, float]:
    """In GB. CPU: sum of the peak resident sets of this process and its workers; shared memory counts several times."""
    if device != "cpu":
        return {
            "allocated": torch.cuda.max_memory_allocated() / GB,
            "reserved": torch.cuda.max_memory_reserved() / GB,
        }
    found = [highest(process) for process in (os.getpid(), *workers())]
    return {"resident": sum(found) / GB} if all(found) else {}


def workers() -> list[int]:
    """Process ids of looped clients."""
    return [p.pid for p in multiprocessing.active_children() if p.pid]


def cpu_seconds() -> float:
    """CPU time of this process and its workers so far, which does not depend on other load."""
    total = time.process_time()
    for worker in workers():
        with contextlib.suppress(OSError):  # not Linux
            user, system = Path(f"/proc/{worker}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[11:13]
            total += (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return total


def highest(process: int) -> int:
    """Peak resident set in bytes; 0 if the system does not report it."""
    with contextlib.suppress(OSError):
        line = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text(encoding="ascii"))
        return 1024 * int(line[1]) if line else 0
    return 0


def load() -> float | None:
    """Load average of the last minute."""
    return round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None


def provenance(device: str) -> dict[str, Any]:
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return {
        "commit": commit.stdout.strip(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": torch.cuda.get_device_name() if device != "cpu" else f"{platform.machine()}, {cores()} cores",
        "date": time.strftime("%Y-%m-%d"),
    }
