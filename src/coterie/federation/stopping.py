"""Ctrl-C between rounds."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SAID = b"\ncoterie: stops after this round; Ctrl-C once more stops at once\n"


class Stopped(KeyboardInterrupt):
    """The user asked for it, and what was reached is saved."""


@contextmanager
def stoppable() -> Iterator[Callable[[], bool]]:
    """Whether the user pressed Ctrl-C. The second time works as it does elsewhere."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before in (None, signal.SIG_IGN):
        yield lambda: False
        return
    asked = threading.Event()

    def ask(*_: Any) -> None:
        asked.set()
        signal.signal(signal.SIGINT, before)
        os.write(2, SAID)  # print() could be in the middle of another line

    signal.signal(signal.SIGINT, ask)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)
