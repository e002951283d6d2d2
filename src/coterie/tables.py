"""Tables as text: Markdown, LaTeX, CSV, or for a terminal."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import NamedTuple

from coterie.core.errors import unknown

FORMATS = ("terminal", "markdown", "latex", "csv")
LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$"}
LATEX |= {letter: f"\\{letter}" for letter in "&%$#_{}"} | {"<": "$<$", ">": "$>$"}
LATEX |= {"τ": r"$\tau$", "ε": r"$\varepsilon$", "λ": r"$\lambda$"}


class Table(NamedTuple):
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def show(tables: Sequence[Table], format: str = "terminal") -> None:
    """Print them, in one of FORMATS."""
    if format == "terminal":
        from coterie.display import show_table

        for table in tables:
            show_table(*filled(table))
        return
    writers = {"markdown": markdown, "latex": latex, "csv": as_csv}
    if format not in writers:
        raise unknown("format", format, FORMATS)
    print("\n".join(writers[format](table) for table in tables), end="")


def filled(table: Table) -> Table:
    """Without the columns that say nothing: a terminal is narrow."""
    shown = [at for at in range(len(table.header)) if any(row[at] != "-" for row in table.rows)]
    rows = [[row[at] for at in shown] for row in table.rows]
    return table._replace(header=[table.header[at] for at in shown], rows=rows) if rows else table


def markdown(table: Table) -> str:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"

    marks = ["---"] + ["---:"] * (len(table.header) - 1)
    lines = [f"**{table.title}**", "", line(table.header), f"|{'|'.join(marks)}|", *map(line, table.rows)]
    return "\n".join([*lines, *(["", table.note] if table.note else [])]) + "\n"


def latex(table: Table) -> str:
    def line(cells: Sequence[str]) -> str:
        return f"    {' & '.join(map(escaped, cells))} \\\\"

    rows = "\n".join(map(line, table.rows))
    columns = "l" + "r" * (len(table.header) - 1)
    note = f"  \\par\\smallskip\\footnotesize {escaped(table.note)}\n" if table.note else ""
    return (
        f"\\begin{{table}}\n  \\centering\n  \\caption{{{escaped(table.title)}}}\n"
        f"  \\begin{{tabular}}{{{columns}}}\n    \\toprule\n{line(table.header)}\n    \\midrule\n"
        f"{rows}\n    \\bottomrule\n  \\end{{tabular}}\n{note}\\end{{table}}\n"
    )


def escaped(text: str) -> str:
    return "".join(LATEX.get(letter, letter) for letter in text)


def as_csv(table: Table) -> str:
    """Header and rows only: title and note are for people."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([table.header, *table.rows])
    return text.getvalue()
