"""Tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from coterie.core.printable import printable

GAP = 2  # characters between columns
WORDS = ("about", "from", "where", "dataset", "data")  # left-aligned columns
console = Console()


def print_line(line: str) -> None:
    """Print a line as it is."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def silent(line: str) -> None:
    pass


def show_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> None:
    title, header, rows = printable(title), list(map(printable, header)), [list(map(printable, row)) for row in rows]
    table = light([[name, *(row[i] for row in rows)] for i, name in enumerate(header)])
    table.title, table.caption = Text(title), Text(printable(note)) if note else None
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table, "")


def show_groups(groups: Mapping[str, Sequence[Mapping[str, str]]], note: str) -> None:
    """Print groups of rows, each under its title, with aligned columns."""
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
    """An empty table with a column for each of these lists of texts; the first text is its name."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0))
    table.title_justify = table.caption_justify = "left"
    for i, (width, texts) in enumerate(zip(widths(columns, console.width), columns, strict=True)):
        words = i == 0 or texts[0] in WORDS
        table.add_column(texts[0], justify="left" if words else "right", width=width, overflow="fold")
    return table


def widths(columns: Sequence[Sequence[str]], room: int) -> list[int]:
    """Widths of columns with these texts, in `room` characters. Words are broken last, in the first column never."""
    lines = [[cell_len(line) for text in texts for line in text.split("\n")] for texts in columns]
    least = [max((cell_len(word) for text in texts for word in text.split()), default=0) for texts in columns]
    found = [max(lengths) for lengths in lines]
    while sum(found) + GAP * (len(found) - 1) > room and found != least:
        can = [i for i in range(len(found)) if found[i] > least[i]]
        narrower = min(can, key=lambda i: (sum(n >= found[i] for n in lines[i]), -found[i]))  # wraps the fewest lines
        found[narrower] -= 1
    while sum(found) + GAP * (len(found) - 1) > room and max(found[1:], default=1) > 1:
        found[found.index(max(found[1:]), 1)] -= 1
    return found
