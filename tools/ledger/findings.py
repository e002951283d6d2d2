"""Findings in prose, from findings.yaml. Their numbers are cited from the results, never typed.

{P1-T1-CIFAR10-20.scaffold.mean}      the row SCAFFOLD of a recipe; also published, difference, gap (its size), std,
                                      half (of the 95 % interval), seeds, late (the mean of the last ten rounds), lead
                                      (over the best other method), lag (its opposite), lead-in-print, or another
                                      point: pre, post, ...
{P1-T7-random.fedpac[local_epochs=5].mean}  at one value of the setting that varies
{P2-T2-CIFAR10.fedper[P].mean}        a measure other than the first; follows the value, if any
{cifar10-20.fedbabu.finished}         a run that predates recipes: file, method, point
{data.emnist.test:,}                  number of samples of a split
{shares.pfakd.ours:.0f}               how much clients differ, from shares.json
"""

from __future__ import annotations

import re
import textwrap
from typing import Any

from coterie.core.errors import CoterieError, unknown
from coterie.core.names import spelling
from coterie.core.validation import MappingReader, fitting, load_yaml
from coterie.papers.recipes.recipe import SIZES
from coterie.papers.results import load
from tools.ledger.claims import claims
from tools.ledger.files import FINDINGS, Files
from tools.ledger.sections import Cell, cells

CITED = re.compile(r"\{([^{}]*)\}")
FORM = re.compile(r"([\w.+-]+)\.([\w-]+)(?:\[([^\]]*)\])?\.([\w-]+)(?::(.*))?")
CODE = re.compile(r"`[^`]*`")  # names of recipes and settings
TYPED = re.compile(r"\d+[.,]\d+(?: ?%)?|\d+ ?%")  # with a decimal point or a thousands separator, or in percent
SHARES = "shares"
LEADS = ("lead", "lag", "lead-in-print")
WIDTH = 118


class Findings:
    def __init__(self, files: Files) -> None:
        self.files, self.path = files, files.folder / FINDINGS
        try:
            keys = MappingReader("", load_yaml(self.path.read_text(encoding="utf-8")) if self.path.exists() else {})
            self.texts = texts(MappingReader("findings: ", keys.take("findings", dict, {})))
            self.notes = texts(MappingReader("notes: ", keys.take("notes", dict, {})))
            self.claims = texts(MappingReader("claims: ", keys.take("claims", dict, {})))
            self.gaps = texts(MappingReader("gaps: ", keys.take("gaps", dict, {})))
            keys.close()
            self.texts, self.notes, self.claims = (
                {name: self.resolved(text) for name, text in group.items()}
                for group in (self.texts, self.notes, self.claims)
            )
        except (OSError, UnicodeDecodeError) as error:
            raise CoterieError(f"{self.path}: cannot be read: {error}") from None
        except CoterieError as error:
            raise CoterieError(f"{self.path}: {error}") from None

    def as_list(self, found: dict[str, str]) -> str:
        """A Markdown list with one item per text."""
        items = [f"- **{name}.** {text}" for name, text in found.items()]
        return "\n".join(textwrap.fill(item, WIDTH, subsequent_indent="  ", break_on_hyphens=False) for item in items)

    def resolved(self, text: str) -> str:
        """Replace the citations of a text by their numbers."""
        if typed := TYPED.search(CODE.sub("", CITED.sub("", text))):
            raise CoterieError(f"'{typed[0]}' in '{text:.40}...' must be cited from a result, as {{...}}")
        return CITED.sub(lambda found: self.cited(found[1]), text)

    def cited(self, reference: str) -> str:
        form = FORM.fullmatch(reference)
        if not form:
            raise CoterieError(f"{{{reference}}} is not of the form SOURCE.ROW.NUMBER")
        source, row, value, name, spec = form.groups()
        try:
            number = self.number(source, row, value or "", name)
            return format(
                number, spec or ("+.2f" if name == "difference" else ".2f" if isinstance(number, float) else "")
            )
        except (CoterieError, ValueError) as error:
            raise CoterieError(f"{{{reference}}}: {error}") from None

    def number(self, source: str, row: str, value: str, name: str) -> float | int:
        if source == "data":
            if row not in SIZES or name not in ("train", "test"):
                raise unknown("split", f"{row}.{name}", (f"{d}.{s}" for d in SIZES for s in ("train", "test")))
            return SIZES[row][("train", "test").index(name)]
        if source == SHARES:
            return self.share(row, name)
        if source in self.files.early:
            trainings = self.files.early[source].trainings
            if row not in trainings:
                raise unknown(f"method of {source}.json", row, trainings)
            ends = {point: curve["clients"][-1] for point, curve in trainings[row]["history"].items()}
            if name not in ends:
                raise unknown(f"point of {row}", name, ends)
            return float(100 * ends[name])
        cell = self.cell(source, row, value)
        return lead(self.files, cell, name) if name in LEADS else number_of(cell, name)

    def share(self, row: str, name: str) -> float:
        found = load(self.files.folder / f"{SHARES}.json")
        own = found.get(row) if isinstance(found, dict) else None
        if not isinstance(own, dict) or name not in own:
            raise CoterieError(f"{SHARES}.json has no {row}.{name}; `python -m tools.shares` writes it")
        return float(fitting(f"{SHARES}.json: {row}.{name}", own[name], float))

    def cell(self, source: str, row: str, value: str) -> Cell:
        recipe = self.files.recipe(source)
        rows = {spelling(r.name): r for r in recipe.rows}
        if spelling(row) not in rows:
            raise unknown(f"row of {recipe.id}", row, rows)
        *choices, last = value.split(",")
        measure = last if last in recipe.measures else next(iter(recipe.measures))
        value = ",".join(choices) if last in recipe.measures else value
        values = {",".join(f"{name}={setting}" for name, setting in v): v for v in recipe.values}
        if value not in values:
            raise unknown(f"value of {recipe.id}", value, values)
        wanted = rows[spelling(row)].name, values[value], measure
        return next(c for c in cells(self.files, recipe) if (c.row.name, c.value, c.measure) == wanted)


def lead(files: Files, cell: Cell, name: str) -> float:
    """How far a row is ahead of the best other method of its column."""
    for claim in claims(files):
        if (claim.recipe.id, claim.value, claim.measure, claim.hero) == (*here(cell), cell.row.name):
            return {"lead": claim.ours.value, "lag": -claim.ours.value, "lead-in-print": claim.published}[name]
    raise CoterieError("no other method was run")


def here(cell: Cell) -> tuple[Any, ...]:
    return cell.recipe.id, cell.value, cell.measure


def number_of(cell: Cell, name: str) -> float | int:
    published, ours, difference, *_ = cell.comparison
    known: dict[str, Any] = {"published": published and published.mean, "difference": difference}
    known |= {"gap": None if difference is None else abs(difference), "seeds": len(cell.readings)}
    known["late"] = cell.mean(report="mean of last 10")
    known |= ours._asdict() if ours else {"mean": None, "std": None, "half": None}
    found: float | int | None = known[name] if name in known else cell.mean(name)
    if found is None:
        raise CoterieError(f"no such number; available: {', '.join(n for n, v in known.items() if v is not None)}")
    return found


def texts(keys: MappingReader) -> dict[str, str]:
    return {name: " ".join(keys.take(name, str).split()) for name in list(keys.left)}
