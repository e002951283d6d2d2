"""Generates the figures of docs/security.md from the file that `python -m benchmarks.chaos` writes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

FIGURES = Path("benchmarks/results/chaos.json")
PAGE = Path("docs/security.md")
MOST_MEMORY = 64.0  # MB that a process may grow by under attack
BLOCK = re.compile(r"(?<=<!-- chaos -->\n).*?(?=<!-- end -->)", re.S)


def figures(recorded: dict[str, Any]) -> str:
    """Tables in Markdown."""
    parser, live, dying = recorded["parser"], recorded["live"], recorded["dropouts"]
    kills = {name.removeprefix("kills "): found for name, found in recorded.items() if name.startswith("kills ")}
    rows = [
        *kills.items(),
        ("all", {key: sum(k[key] for k in kills.values()) for key in ("kills", "runs", "bit_equal")}),
    ]
    lines = [
        "| killed command | kills | runs or federations | bit-equal to the uninterrupted one |",
        "|---|---:|---:|---:|",
    ]
    lines += [f"| `{name}` | {k['kills']:,} | {k['runs']:,} | {k['bit_equal']:,} |" for name, k in rows]
    lines += ["", "| hostile messages | sent | accepted | memory growth | honest result |", "|---|---:|---:|---:|---|"]
    lines += [
        f"| to the parsers | {parser['messages']:,} | {parser['accepted']:,} | {parser['memory_mb']:.1f} MB | |",
        f"| through a broker | {live['messages']:,} | none | {live['memory_mb']:.1f} MB | equal to the simulation "
        f"({live['equal_to_simulation']} of {live['federations']} federations) |",
        "",
        f"The parsers refused {parser['refused']:,} messages. The other {parser['same']:,} had the content of the "
        "honest message: they differed only in insignificant whitespace or in the free text of an error report.",
        "",
        f"Failing devices: {dying['devices']} devices with {dying['clients']} clients, {dying['rounds']} rounds. "
        f"{dying['kills']['devices']} kills of devices (3 of 10 in each round), {dying['kills']['broker']} of the "
        f"broker, {dying['kills']['server']} of the server. The federation finished; {dying['answers_missing']} of "
        f"{dying['answers']} answers were missing; its server is bit-equal to a simulation with the same dropouts.",
        "",
        f"Seed {parser['seed']}; {listed(recorded, 'machine')}; commit {listed(recorded, 'commit')} "
        f"(per part: see the file); torch {listed(recorded, 'torch')}; {listed(recorded, 'date')}; "
        f"{sum(part['seconds'] for part in recorded.values()):,} s.",
    ]
    return "\n".join(lines) + "\n"


def listed(recorded: dict[str, Any], name: str) -> str:
    return ", ".join(dict.fromkeys(str(found[name]) for found in recorded.values()))


def write(source: Path = FIGURES, page: Path = PAGE) -> None:
    text = page.read_text(encoding="utf-8")
    made = figures(json.loads(source.read_text(encoding="utf-8")))
    page.write_text(BLOCK.sub(lambda _: made, text), encoding="utf-8")
