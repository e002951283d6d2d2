"""Stop on signals from Ctrl-C, systemd, a batch scheduler or a closed terminal."""

from __future__ import annotations

import os
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
SAID = "\ncoterie: stopping after this round; press Ctrl-C or send the signal again to stop at once\n"
TOGETHER = 0.2  # seconds; `timeout` and batch schedulers send one signal twice, to a process and to its group


class Stopped(KeyboardInterrupt):
    """The run was asked to stop; its state is saved."""

    def __init__(self, said: str = "", by: int = signal.SIGINT) -> None:
        super().__init__(said)
        self.signal = by


class StoppedAtOnce(KeyboardInterrupt):
    """The run was asked to stop twice. The round in progress is lost; the last checkpoint is not."""

    def __init__(self, by: int) -> None:
        super().__init__("stopped at once")
        self.signal = by


@contextmanager
def stoppable(said: str = SAID, signals: Sequence[int] = SIGNALS) -> Iterator[Callable[[], int]]:
    """Yield a function that returns the signal by which the process was asked to stop, or 0.

    said: printed when the first signal arrives. A second one raises StoppedAtOnce, wherever the program is; a third one
    has its default effect. SIGTERM and SIGHUP within TOGETHER seconds of the first count as the same request.
    """
    before = {number: signal.getsignal(number) for number in signals}
    here = threading.current_thread() is threading.main_thread()
    taken = [n for n, old in before.items() if here and old not in (None, signal.SIG_IGN)]  # nohup ignores SIGHUP
    received: list[tuple[int, float]] = []  # signal, when

    def handle(number: int, _: Any) -> None:
        now = time.monotonic()
        if not received:
            received.append((number, now))
            say(said)
        elif number == signal.SIGINT or now - received[0][1] > TOGETHER:
            for each in taken:
                signal.signal(each, before[each])
            raise StoppedAtOnce(number)

    for number in taken:
        signal.signal(number, handle)
    try:
        yield lambda: received[0][0] if received else 0
    finally:
        for number in taken:
            signal.signal(number, before[number])


def say(text: str) -> None:
    """Print to the terminal. If it is gone, send all further output to the null device."""
    try:
        os.write(2, text.encode())  # print() could be in the middle of another line
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            if stat.S_ISCHR(os.fstat(stream).st_mode):
                os.dup2(null, stream)
        os.close(null)
