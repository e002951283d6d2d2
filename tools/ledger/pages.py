"""The pages that the ledger writes, between marks: <!-- name --> ... <!-- end -->."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from coterie.core.errors import CoterieError
from coterie.papers.verdicts import DRAWS, SEEDS, WIDEST, Noises, RunNoise
from tools.ledger import claims, hypotheses, leaderboard, readme, tuned
from tools.ledger.coverage import by_reading, coverage, noise_table
from tools.ledger.files import Files
from tools.ledger.findings import TYPED, Findings
from tools.ledger.overview import overview
from tools.ledger.sections import PICTURES, section

CHECKED = ("docs/results.md", "docs/claims.md", "docs/leaderboard.md")
PROCEDURE = {"95 %", "1.96", str(WIDEST)}
NOISE = "src/coterie/papers/noise.yaml"


def blocks(files: Files) -> dict[str, dict[str, str]]:
    """Page -> mark -> generated text."""
    findings = Findings(files)
    tables = "\n\n".join(filter(None, (section(files, recipe, findings.notes) for recipe in files.recipes)))
    shown = {dataset for recipe in files.recipes for dataset in recipe.datasets}  # notes follow their tables
    notes = "\n".join(f"- {note}" for dataset, note in findings.notes.items() if dataset not in shown)
    return {
        "docs/results.md": {
            "readings": by_reading(files),
            "coverage": coverage(files, findings.gaps),
            "noise": noise_table(files),
            "overview": overview(files),
            "notes": notes,
            "tables": tables,
            "findings": findings.as_list(findings.texts),
            "hypotheses": hypotheses.table(files, findings),
        },
        "docs/claims.md": {
            "summary": claims.summary(files),
            "behind": claims.behind(files),
            "papers": findings.as_list(findings.claims),
            "claims": claims.table(files),
        },
        **board_page(files),
        **{page: readme.blocks(files, words) for page, words in readme.WORDS.items()},
    }


def board_page(files: Files) -> dict[str, dict[str, str]]:
    """docs/leaderboard.md: the tuned leaderboard, and the smoke test of all methods; each only if it was run."""
    texts = tuned.blocks(files.folder) if tuned.exists(files.folder) else {}
    texts |= leaderboard.blocks(files.folder) if files.has_leaderboard else {}
    return {"docs/leaderboard.md": texts} if texts else {}


def pages(files: Files, root: Path) -> dict[Path, tuple[str, str]]:
    """Every picture and page, and the noise that verdicts use: the current content, and what the result files give."""
    found = {}
    for recipe in files.recipes:
        if drawn := files.picture(recipe):
            path = root / "docs" / PICTURES / f"{recipe.id}.svg"
            found[path] = path.read_bytes().decode(errors="replace") if path.is_file() else "", drawn
    if tuned.exists(files.folder) and (drawn := tuned.picture(files.folder)):
        path = root / "docs" / PICTURES / tuned.PICTURE
        found[path] = path.read_bytes().decode(errors="replace") if path.is_file() else "", drawn
    path = root / NOISE
    found[path] = path.read_text(encoding="utf-8") if path.is_file() else "", noise_text(files.noises)
    for name, texts in blocks(files).items():
        page = read(path := root / name)
        found[path] = page, renewed(page, {mark: f"\n\n{text}\n\n" for mark, text in texts.items()}, str(path))
        if name in CHECKED and (numbers := typed(page)):
            raise CoterieError(f"{path}: {', '.join(numbers)} outside of the marks; generate numbers from result files")
    return found


def typed(page: str) -> list[str]:
    """Numbers outside of the marks, without code, links and the numbers of our procedure."""
    text = re.sub(r"<!-- [\w-]+ -->.*?<!-- end -->|^```.*?^```|`[^`]*`|\]\([^)]*\)", "", page, flags=re.S | re.M)
    return [number for number in TYPED.findall(text) if number not in PROCEDURE]


def read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CoterieError(f"{path}: {reason}; run this in the folder that contains README.md and docs/") from None


def renewed(page: str, texts: Mapping[str, str], where: str) -> str:
    """Replace the text between the marks of a page."""
    for name, text in texts.items():
        parts = re.split(rf"<!-- {re.escape(name)} -->.*?<!-- end -->", page, flags=re.S)
        if len(parts) != 2:
            raise CoterieError(f"{where}: expected one mark <!-- {name} --> ... <!-- end -->, found {len(parts) - 1}")
        page = f"<!-- {name} -->{text}<!-- end -->".join(parts)
    return page


def differences(old: str, new: str) -> list[str]:
    """Headings of the sections in which two versions of a page differ."""
    before, after = by_heading(old), by_heading(new)
    return [heading for heading in {**after, **before} if before.get(heading) != after.get(heading)]


def by_heading(page: str) -> dict[str, str]:
    parts = re.split(r"^#+ (.*)$", page, flags=re.M)
    return dict(zip(["the beginning", *parts[1::2]], parts[::2], strict=True))


def noise_text(noises: Noises) -> str:
    """The content of noise.yaml."""
    lines = ["# Standard deviation between runs in points, pooled per dataset by tools/ledger from benchmarks/results."]
    for dataset in dict.fromkeys(dataset for dataset, _ in noises):
        kinds = [(kind, noises[dataset, kind]) for kind in (SEEDS, DRAWS) if (dataset, kind) in noises]
        lines += [
            f"{dataset}:",
            *(f"  {kind}: {{{entry(noise)}}}" for kind, noise in kinds),
        ]
    return "\n".join(lines) + "\n"


def entry(noise: RunNoise) -> str:
    where = ", ".join(noise.measured_in)
    return f"std: {noise.std:.4f}, freedom: {noise.freedom}, cells: {noise.cells}, measured_in: [{where}]"
