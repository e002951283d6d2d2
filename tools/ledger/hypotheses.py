"""Hypotheses about misses, from hypotheses.yaml, with the runs that would tell and what became of them."""

from __future__ import annotations

from typing import Any, NamedTuple

from coterie.core.errors import CoterieError, unknown
from coterie.core.validation import MappingReader, fitting, load_yaml
from tools.ledger.coverage import plain
from tools.ledger.files import HYPOTHESES, Files
from tools.ledger.findings import Findings
from tools.ledger.sections import Cell, cells

VERDICTS = ("kept", "dropped", "open")
NOT_RUN = "not run"


class Hypothesis(NamedTuple):
    miss: str
    why: str
    rows: dict[str, tuple[str, ...]]  # recipe -> rows; empty: all
    needs: str  # what Coterie cannot do yet
    verdict: str
    seen: str

    def numbers(self, files: Files) -> list[Cell]:
        """The printed numbers that its runs are compared with."""
        found = []
        for name, rows in self.rows.items():
            recipe = files.recipe(name)
            for row in rows:
                if row not in [own.name for own in recipe.rows]:
                    raise unknown(f"row of {name}", row, [own.name for own in recipe.rows])
            found += [c for c in cells(files, recipe) if c.comparison.published and (not rows or c.row.name in rows)]
        return found


def hypotheses(files: Files, findings: Findings) -> list[Hypothesis]:
    path = files.folder / HYPOTHESES
    try:
        document = load_yaml(path.read_text(encoding="utf-8")) if path.exists() else {}
        keys = MappingReader("", document)
        found = [
            parsed(f"hypotheses[{i}]: ", entry, findings) for i, entry in enumerate(keys.take("hypotheses", list, []))
        ]
        keys.close()
    except (OSError, UnicodeDecodeError) as error:
        raise CoterieError(f"{path}: cannot be read: {error}") from None
    except CoterieError as error:
        raise CoterieError(f"{path}: {error}") from None
    return found


def parsed(where: str, entry: Any, findings: Findings) -> Hypothesis:
    keys = MappingReader(where, entry)
    miss, why, needs, verdict, seen = (
        keys.take("miss", str),
        keys.take("why", str),
        keys.take("needs", str, ""),
        keys.take("verdict", str, ""),
        keys.take("seen", str, ""),
    )
    rows = {
        name: fitting(f"{where}rows: {name}", own, tuple[str, ...]) for name, own in keys.take("rows", dict, {}).items()
    }
    keys.close()
    if bool(rows) == bool(needs):
        raise CoterieError(f"{where}give either rows, or what it needs")
    if verdict and verdict not in VERDICTS:
        raise unknown(f"{where}verdict", verdict, VERDICTS)
    return Hypothesis(findings.resolved(miss), findings.resolved(why), rows, needs, verdict, findings.resolved(seen))


def table(files: Files, findings: Findings) -> str:
    """One line per hypothesis. A verdict without a run, or a run without a verdict, is an error."""
    rows, path = [], files.folder / HYPOTHESES
    for own in hypotheses(files, findings):
        try:
            numbers = own.numbers(files)
        except CoterieError as error:
            raise CoterieError(f"{path}: {error}") from None
        run = sum(cell.comparison.ours is not None for cell in numbers)
        if bool(run) != bool(own.verdict):
            raise CoterieError(f"{path}: '{own.why:.40}' has {run} runs and verdict '{own.verdict}'")
        recipes = ", ".join(f"`{name}`" for name in own.rows) or "-"
        seen = own.seen or (f"cannot be run yet: needs {own.needs}" if own.needs else "")
        counts = [f"{run} of {len(numbers)}", seeds(numbers)] if numbers else ["-", "-"]
        rows.append([own.miss, own.why, recipes, *counts, own.verdict or NOT_RUN, seen])
    header = ["miss", "hypothesis", "run that would tell", "numbers run", "seeds", "verdict", "what we saw"]
    return plain(header, rows) if rows else ""


def seeds(numbers: list[Cell]) -> str:
    """How many of the numbers that were run have; the least and the most."""
    found = sorted({len(cell.readings) for cell in numbers if cell.comparison.ours is not None})
    return "-" if not found else f"{found[0]} to {found[-1]}" if len(found) > 1 else str(found[0])
