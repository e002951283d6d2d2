"""The table of docs/which-method.md: the methods that `coterie methods --suggest` names for each situation.

python -m tools.which_method     writes it into the page
"""

from __future__ import annotations

from pathlib import Path

from coterie.analysis.catalogue import entries
from coterie.analysis.choosing import suggestions
from coterie.core.families import DERIVED, DESIGNED, SITUATIONS

PAGE = Path(__file__).parents[1] / "docs" / "which-method.md"
BEGIN, END = "<!-- situations -->\n", "<!-- end -->\n"
SHOWN = 6


def table() -> str:
    lines = ["", "| `--suggest` | why | methods |", "|---|---|---|"]
    listed = entries()
    for situation in SITUATIONS:
        found = [f"`{s.entry.name}`" for s in suggestions(listed, [situation])]
        more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        why = "; or ".join(reasons[situation] for reasons in (DESIGNED, DERIVED) if situation in reasons)
        lines.append(f"| {situation} | {why} | {', '.join(found[:SHOWN])}{more} |")
    return "\n".join([*lines, "", ""])


def page() -> str:
    """The page with the table of this code."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END, 1)[1]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
