"""Tables as text (Markdown, LaTeX, CSV, HTML, or for a terminal), and rows as pandas DataFrames."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from coterie.core.errors import CoterieError, unknown

FORMATS = ("terminal", "markdown", "latex", "csv", "html")
ENDINGS = {".tex": "latex", ".md": "markdown", ".csv": "csv", ".html": "html"}
LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "²": r"$^2$"}
LATEX |= {letter: f"\\{letter}" for letter in "&%$#_{}"} | {"<": "$<$", ">": "$>$"}
LATEX |= {"τ": r"$\tau$", "ε": r"$\varepsilon$", "λ": r"$\lambda$", "†": r"$^{\dagger}$"}


class TextTable(NamedTuple):
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    bold: frozenset[tuple[int, int]] = frozenset()  # (row, column)
    label: str = ""  # for \ref in LaTeX

    def marked(self, before: str, after: str, clean: Callable[[str], str]) -> list[list[str]]:
        """The rows as clean text, bold cells between `before` and `after`."""
        return [
            [
                f"{before}{clean(text)}{after}" if (row, at) in self.bold else clean(text)
                for at, text in enumerate(cells)
            ]
            for row, cells in enumerate(self.rows)
        ]


def frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    """A pandas DataFrame of these rows; a list of dicts where pandas is not installed."""
    try:
        import pandas
    except ImportError:
        return [dict(row) for row in rows]
    return pandas.DataFrame(list(rows))


def show(tables: Sequence[TextTable], format: str = "terminal") -> None:
    """Print the tables in one of FORMATS."""
    if format == "terminal":
        from coterie.analysis.terminal import show_table

        for table in map(filled, tables):
            show_table(table.title, table.header, table.rows, table.note)
        return
    print("\n".join(text(table, format) for table in tables), end="")


def text(table: TextTable, format: str) -> str:
    """The table in one of FORMATS but terminal."""
    writers = {"markdown": markdown, "latex": latex, "csv": as_csv, "html": as_html}
    if format not in writers:
        raise unknown("format", format, FORMATS)
    return writers[format](table)


def format_of(path: Path, format: str | None = None) -> str:
    """The format of a file: this one, or that of its ending."""
    found = format or ENDINGS.get(path.suffix.lower())
    if found is None or found == "terminal":
        raise CoterieError(f"{path}: tables are written as .tex, .md, .csv or .html, or name one with --format")
    return found


def filled(table: TextTable) -> TextTable:
    """Without columns of "-" only: a terminal is narrow."""
    shown = [at for at in range(len(table.header)) if any(row[at] != "-" for row in table.rows)]
    rows = [[row[at] for at in shown] for row in table.rows]
    return table._replace(header=[table.header[at] for at in shown], rows=rows, bold=frozenset()) if rows else table


def clean(text: str) -> str:
    """The text of a Markdown cell."""
    return text.replace("|", "\\|")


def markdown(table: TextTable) -> str:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cells)} |"

    marks = ["---"] + ["---:"] * (len(table.header) - 1)
    rows = map(line, table.marked("**", "**", clean))
    lines = [f"**{table.title}**", "", line([*map(clean, table.header)]), f"|{'|'.join(marks)}|", *rows]
    return "\n".join([*lines, *(["", table.note] if table.note else [])]) + "\n"


def latex(table: TextTable) -> str:
    def line(cells: Sequence[str]) -> str:
        return f"    {' & '.join(cells)} \\\\"

    rows = "\n".join(map(line, table.marked("\\textbf{", "}", escaped)))
    columns = "l" + "r" * (len(table.header) - 1)
    note = f"  \\par\\smallskip\\footnotesize {escaped(table.note)}\n" if table.note else ""
    label = f"  \\label{{{table.label}}}\n" if table.label else ""
    return (
        f"\\begin{{table}} % needs \\usepackage{{booktabs}}\n  \\centering\n"
        f"  \\caption{{{escaped(table.title)}}}\n{label}"
        f"  \\begin{{tabular}}{{{columns}}}\n    \\toprule\n{line([*map(escaped, table.header)])}\n    \\midrule\n"
        f"{rows}\n    \\bottomrule\n  \\end{{tabular}}\n{note}\\end{{table}}\n"
    )


def as_html(table: TextTable) -> str:
    def line(cells: Sequence[str], kind: str) -> str:
        return f"  <tr>{''.join(f'<{kind}>{text}</{kind}>' for text in cells)}</tr>\n"

    rows = "".join(line(cells, "td") for cells in table.marked("<b>", "</b>", escape))
    note = f"<p>{escape(table.note)}</p>\n" if table.note else ""
    header = line([*map(escape, table.header)], "th")
    return f"<table>\n  <caption>{escape(table.title)}</caption>\n{header}{rows}</table>\n{note}"


def escaped(text: str) -> str:
    return "".join(LATEX.get(letter, letter) for letter in text)


def as_csv(table: TextTable) -> str:
    """Header and rows only, without title and note."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([table.header, *table.rows])
    return text.getvalue()
