"""Progress of a run: a bar in terminals and notebooks, plain lines in logs."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from html import escape
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from coterie.analysis.terminal import console
from coterie.federation import Round

errors = Console(stderr=True)
Watching = Callable[[str, int], AbstractContextManager[Callable[[Round], None]]]  # title, rounds -> observer


def unwatched(title: str, rounds: int) -> AbstractContextManager[Callable[[Round], None]]:
    return nullcontext(lambda record: None)


class Watcher(Protocol):
    def __call__(self, record: Round) -> None: ...
    def __enter__(self) -> Watcher: ...
    def __exit__(self, *reason: Any) -> None: ...


def scores(record: Round) -> str:
    """Such as «accuracy: personal 88.1 after training 88.6 global 80.2»."""
    names = {"pre": "personal", "post": "after training", "global": "global", "finished": "finished"}
    names |= {"new_pre": "new clients", "new_post": "new clients after training", "new_global": "global on new clients"}
    shown = [(name, record.score(point)) for point, name in names.items()]
    found = [f"{name} {record.metric.number(value, 1)}" for name, value in shown if value is not None]
    return f"{record.metric.words}: {'  '.join(found)}" if found else ""


def round_line(record: Round, seconds: float) -> str:
    """A round of a federation of devices, in a line."""
    selected, out = len(record.participants), len(record.left_out)
    missing = f", without clients {', '.join(map(str, record.left_out))}" if out else ""
    megabytes = f"{record.bytes_down / 1e6:.2f} MB down, {record.bytes_up / 1e6:.2f} MB up"
    return (
        f"round {record.number}: {selected - out} of {selected} answered{missing}; {scores(record)}; {megabytes}; "
        f"{seconds:.0f} s"
    )


def first_lines(on: Console | None, shown: set[str]) -> Callable[[str], None]:
    """A function that prints the first lines of a run, without those of runs before. shown: lines that were printed."""

    def show(line: str) -> None:
        if on is not None and line not in shown:
            shown.add(line)
            on.print(line, highlight=False, soft_wrap=True, markup=False)

    return show


class Lines:
    """One plain line for every evaluated round, for logs and pipes. on: None prints nothing."""

    def __init__(self, title: str, rounds: int, on: Console | None) -> None:
        self.title, self.rounds, self.on, self.start = title, rounds, on, time.monotonic()

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *reason: Any) -> None:
        pass

    def __call__(self, record: Round) -> None:
        spent = time.monotonic() - self.start
        left = spent / record.number * max(self.rounds - record.number, 0)
        if record.scores and self.on is not None:
            line = f"{self.title}  round {record.number}/{self.rounds}  {scores(record)}"
            self.on.print(f"{line}  {spent:.0f} s, {left:.0f} s left", highlight=False, soft_wrap=True)


class Bar:
    """A live bar with scores and time left, for terminals."""

    def __init__(self, title: str, rounds: int, on: Console) -> None:
        columns = ("[bold]{task.description}", "{task.fields[shown]}")
        self.progress = Progress(
            TextColumn(columns[0]),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn(columns[1]),
            console=on,
        )
        self.bar = self.progress.add_task(title, total=rounds, shown="")
        self.live = Live(self.progress, console=on, refresh_per_second=4)

    def __enter__(self) -> Bar:
        self.live.__enter__()
        return self

    def __exit__(self, *reason: Any) -> None:
        self.live.__exit__(*reason)

    def __call__(self, record: Round) -> None:
        self.progress.update(self.bar, completed=record.number)
        if record.scores:
            self.progress.update(self.bar, shown=scores(record))


class NotebookBar:
    """The same in a notebook, as one HTML output that is updated."""

    def __init__(self, title: str, rounds: int) -> None:
        self.title, self.rounds, self.shown, self.output = title, rounds, "", None

    def __enter__(self) -> NotebookBar:
        from IPython.display import display

        self.output = display(self._html(0), display_id=True)  # type: ignore[no-untyped-call, unused-ignore]
        return self

    def __exit__(self, *reason: Any) -> None:
        pass

    def __call__(self, record: Round) -> None:
        self.shown = scores(record) if record.scores else self.shown
        if self.output is not None:
            self.output.update(self._html(record.number))

    def _html(self, number: int) -> Any:
        from IPython.display import HTML

        done = min(number, self.rounds)  # one round more where all clients train once more at the end
        return HTML(  # type: ignore[no-untyped-call, unused-ignore]
            f"<b>{escape(self.title)}</b> <progress value={done} max={self.rounds}></progress> "
            f"{done}/{self.rounds} {escape(self.shown)}"
        )


def watcher(title: str, rounds: int, on: Console | None = console) -> Watcher:
    """Progress of a command: a bar in a terminal, otherwise lines. on: None shows nothing."""
    return Bar(title, rounds, on) if on is not None and on.is_terminal else Lines(title, rounds, on)


def progress_bar(title: str, rounds: int) -> Watcher:
    """Progress of coterie.run, on stderr: a bar in terminals and notebooks, otherwise nothing."""
    if errors.is_jupyter:
        return NotebookBar(title, rounds)
    return Bar(title, rounds, errors) if errors.is_terminal else Lines(title, rounds, None)
