"""Ctrl-C, and other ways to be asked to stop: by systemd, a batch scheduler, a terminal that is closed."""

from __future__ import annotations

import os
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

ASKING = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
SAID = "\ncoterie: stops after this round; Ctrl-C once more stops at once\n"


class Stopped(KeyboardInterrupt):
    """Somebody asked for it, and what was reached is saved."""

    def __init__(self, said: str = "", by: int = signal.SIGINT) -> None:
        super().__init__(said)
        self.signal = by


@contextmanager
def stoppable(said: str = SAID) -> Iterator[Callable[[], int]]:
    """The signal by which somebody asked to stop, or 0. said: what is answered at once.

    The next Ctrl-C works as it does elsewhere. Other signals are often sent twice, to a process and to its group, so
    that nobody means anything by the second one.
    """
    before = {number: signal.getsignal(number) for number in ASKING}
    here = threading.current_thread() is threading.main_thread()
    taken = [n for n, old in before.items() if here and old not in (None, signal.SIG_IGN)]  # nohup ignores SIGHUP
    asked: list[int] = []

    def ask(number: int, _: Any) -> None:
        if not asked:
            say(said)
        asked.append(number)
        if signal.SIGINT in taken:
            signal.signal(signal.SIGINT, before[signal.SIGINT])

    for number in taken:
        signal.signal(number, ask)
    try:
        yield lambda: asked[0] if asked else 0
    finally:
        for number in taken:
            signal.signal(number, before[number])


def say(text: str) -> None:
    """On the terminal. If that is gone, all that would be shown there goes nowhere from now on."""
    try:
        os.write(2, text.encode())  # print() could be in the middle of another line
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            if stat.S_ISCHR(os.fstat(stream).st_mode):
                os.dup2(nowhere, stream)
        os.close(nowhere)
