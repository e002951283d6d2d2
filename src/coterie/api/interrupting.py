"""Ctrl-C in runs without a folder: the run ends normally after the current round."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from coterie.federation import Ended, Ending, Round
from coterie.runs.stopping import stoppable

INTERRUPTED = "interrupted"  # reason why such a run ended
AGAIN = "press Ctrl-C again to stop at once, without a result"
OF_A_RUN = f"\ncoterie: the run ends after this round; {AGAIN}\n"
OF_A_COMPARISON = f"\ncoterie: the comparison ends after this round, with the runs that are finished; {AGAIN}\n"

Interrupted = Callable[[], int]  # returns the signal once Ctrl-C was pressed, else 0


@dataclass(frozen=True)
class InterruptibleEnding(Ending):
    """The same conditions, and Ctrl-C."""

    interrupted: Interrupted = field(default=lambda: 0, kw_only=True)

    def reached(self, records: Sequence[Round], point: str, spent: float) -> Ended | None:
        if self.interrupted():
            return Ended(INTERRUPTED, len(records), "Ctrl-C")
        return super().reached(records, point, spent)


@contextmanager
def interruptible(active: bool = True, says: str = OF_A_RUN) -> Iterator[Interrupted]:
    """Take Ctrl-C in this block. active: False leaves it alone, as for runs whose folder can be resumed.

    says: what the first Ctrl-C prints.

    SIGTERM is not taken: a script that is asked to terminate must not continue with a partial result.
    """
    if not active:
        yield lambda: 0
        return
    with stoppable(says, [signal.SIGINT]) as interrupted:
        yield interrupted
