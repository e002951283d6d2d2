"""The machine: what it is, how much memory was used, and waiting for it."""

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
    """Wait until the GPU has done what it was told, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def forget_peak() -> None:
    """Give free memory back, and begin anew."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim:  # glibc; looped clients tell it to keep what is free
        trim(0)
    with contextlib.suppress(OSError):  # no such file, or not ours to write: then the peak is that of the process
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_memory(device: str) -> dict[str, float]:
    """In GB. CPU: resident sets of this process and its workers, each at its largest; what they share counts twice."""
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
    """CPU time of this process and its workers so far. It tells the work, whatever else the machine is doing."""
    total = time.process_time()
    for worker in workers():
        with contextlib.suppress(OSError):  # not Linux
            user, system = Path(f"/proc/{worker}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[11:13]
            total += (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return total


def highest(process: int) -> int:
    """Largest resident set so far, in bytes; 0: the system does not tell."""
    with contextlib.suppress(OSError):
        told = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text(encoding="ascii"))
        return 1024 * int(told[1]) if told else 0
    return 0


def load() -> float | None:
    """Processes at work, on average over the last minute."""
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
