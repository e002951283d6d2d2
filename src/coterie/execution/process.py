"""Settings of the whole process: torch's threads, precision and determinism, and the allocator of the C library."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

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


class Setting(NamedTuple):
    read: Callable[[], Any]
    write: Callable[[Any], None]

    def now(self) -> Any:
        """None: torch does not say, because the newer of its two interfaces to precision was used."""
        try:
            return self.read()
        except RuntimeError:
            return None


@contextmanager
def restored() -> Iterator[None]:
    """After this block, torch's settings are what they were before it."""
    before = [(setting, setting.now()) for setting in SETTINGS]
    try:
        yield
    finally:
        for setting, value in before:
            if value is not None and setting.now() != value:  # setting determinism imports torch's compiler: a second
                setting.write(value)


def attribute(owner: Any, name: str) -> Setting:
    return Setting(lambda: getattr(owner, name), lambda value: setattr(owner, name, value))


def set_deterministic(modes: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(modes[0], warn_only=modes[1])


SETTINGS = (  # in the order in which they are restored
    Setting(torch.get_num_threads, torch.set_num_threads),
    Setting(
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        set_deterministic,
    ),
    attribute(torch.utils.deterministic, "fill_uninitialized_memory"),
    attribute(torch.backends.cudnn, "benchmark"),
    Setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    attribute(torch.backends.cudnn, "allow_tf32"),
    attribute(torch.backends.cuda.matmul, "fp32_precision"),
    attribute(torch.backends.cudnn.conv, "fp32_precision"),  # type: ignore[attr-defined]
    attribute(torch.backends.cudnn.rnn, "fp32_precision"),
    attribute(torch.backends.mkldnn.matmul, "fp32_precision"),  # type: ignore[attr-defined]
)
