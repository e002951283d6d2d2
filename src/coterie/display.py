"""What a person sees while a run goes on, and the table at its end."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from coterie.federation import Round

GAP = 2  # characters between columns
WORDS = ("about", "from", "where", "dataset", "data")  # columns of words, which begin at the left
console = Console()
errors = Console(stderr=True)


class Watcher(Protocol):
    def __call__(self, record: Round) -> None: ...
    def __enter__(self) -> Watcher: ...
    def __exit__(self, *reason: Any) -> None: ...


def accuracies(record: Round) -> str:
    """Such as «personal 88.1 after training 88.6 global 80.2»."""
    names = {"pre": "personal", "post": "after training", "global": "global", "finished": "finished"}
    names |= {"new_pre": "new clients", "new_post": "new clients after training", "new_global": "global on new clients"}
    shown = [(name, record.accuracy(point)) for point, name in names.items()]
    return "  ".join(f"{name} {100 * value:.1f}" for name, value in shown if value is not None)


def round_line(record: Round, seconds: float) -> str:
    """A round of a federation of devices."""
    asked, out = len(record.participants), len(record.left_out)
    missing = f", without clients {', '.join(map(str, record.left_out))}" if out else ""
    megabytes = f"{record.bytes_down / 1e6:.2f} MB down, {record.bytes_up / 1e6:.2f} MB up"
    return (
        f"round {record.number}: {asked - out} of {asked} answered{missing}; {accuracies(record)}; {megabytes}; "
        f"{seconds:.0f} s"
    )


class Lines:
    """One plain line for every measured round: for logs and pipes."""

    def __init__(self, title: str, rounds: int, quiet: bool = False) -> None:
        self.title, self.rounds, self.quiet, self.start = title, rounds, quiet, time.monotonic()

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *reason: Any) -> None:
        pass

    def __call__(self, record: Round) -> None:
        spent = time.monotonic() - self.start
        left = spent / record.number * max(self.rounds - record.number, 0)
        if record.scores and not self.quiet:
            line = f"{self.title}  round {record.number}/{self.rounds}  {accuracies(record)}"
            console.print(f"{line}  {spent:.0f} s, {left:.0f} s left", highlight=False, soft_wrap=True)


class Bar:
    """A live bar with accuracy and time left: for terminals."""

    def __init__(self, title: str, rounds: int) -> None:
        columns = ("[bold]{task.description}", "{task.fields[shown]}")
        self.progress = Progress(
            TextColumn(columns[0]),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn(columns[1]),
            console=console,
        )
        self.task = self.progress.add_task(title, total=rounds, shown="")
        self.live = Live(self.progress, console=console, refresh_per_second=4)

    def __enter__(self) -> Bar:
        self.live.__enter__()
        return self

    def __exit__(self, *reason: Any) -> None:
        self.live.__exit__(*reason)

    def __call__(self, record: Round) -> None:
        self.progress.update(self.task, completed=record.number)
        if record.scores:
            self.progress.update(self.task, shown=accuracies(record))


def watcher(title: str, rounds: int, quiet: bool = False) -> Watcher:
    return Bar(title, rounds) if console.is_terminal and not quiet else Lines(title, rounds, quiet)


def show_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> None:
    table = light([[name, *(row[i] for row in rows)] for i, name in enumerate(header)])
    table.title, table.caption = Text(title), Text(note) if note else None
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table, "")


def show_groups(groups: Mapping[str, Sequence[Mapping[str, str]]], note: str) -> None:
    """Rows under the title of each group, their columns under each other."""
    rows = [row for group in groups.values() for row in group]
    for i, (title, group) in enumerate(groups.items()):
        table = light([[name, *(row[name] for row in rows)] for name in rows[0]])
        table.show_header = not i
        for row in group:
            table.add_row(*map(Text, row.values()))
        console.print(Text(title, style="bold"))
        console.print(table, "")
    console.print(note, highlight=False)


def light(columns: Sequence[Sequence[str]]) -> Table:
    """A table to be filled, with columns for these texts, names first."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0))
    table.title_justify = table.caption_justify = "left"
    for i, (width, texts) in enumerate(zip(widths(columns, console.width), columns, strict=True)):
        words = i == 0 or texts[0] in WORDS
        table.add_column(texts[0], justify="left" if words else "right", width=width, overflow="fold")
    return table


def widths(columns: Sequence[Sequence[str]], room: int) -> list[int]:
    """Of columns with these texts, in so many characters. Words are broken last, and none in the first column."""
    lines = [[cell_len(line) for text in texts for line in text.split("\n")] for texts in columns]
    least = [max((cell_len(word) for text in texts for word in text.split()), default=0) for texts in columns]
    found = [max(lengths) for lengths in lines]
    while sum(found) + GAP * (len(found) - 1) > room and found != least:
        can = [i for i in range(len(found)) if found[i] > least[i]]
        narrower = min(can, key=lambda i: (sum(n >= found[i] for n in lines[i]), -found[i]))  # breaks fewest lines
        found[narrower] -= 1
    while sum(found) + GAP * (len(found) - 1) > room and max(found[1:], default=1) > 1:
        found[found.index(max(found[1:]), 1)] -= 1
    return found
