"""The figures of docs/security.md, from the file that `python -m benchmarks.chaos` writes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

FIGURES = Path("benchmarks/results/chaos.json")
PAGE = Path("docs/security.md")
MOST_MEMORY = 64.0  # MB that a process may grow by under fire
BLOCK = re.compile(r"(?<=<!-- chaos -->\n).*?(?=<!-- end -->)", re.S)


def figures(told: dict[str, Any]) -> str:
    """Tables in Markdown."""
    parser, live, dying = told["parser"], told["live"], told["dropouts"]
    kills = {name.removeprefix("kills "): found for name, found in told.items() if name.startswith("kills ")}
    rows = [
        *kills.items(),
        ("all", {key: sum(k[key] for k in kills.values()) for key in ("kills", "runs", "bit_equal")}),
    ]
    lines = [
        "| killed command | kill -9 | runs or federations | bit-equal to the uninterrupted one |",
        "|---|---:|---:|---:|",
    ]
    lines += [f"| `{name}` | {k['kills']:,} | {k['runs']:,} | {k['bit_equal']:,} |" for name, k in rows]
    lines += ["", "| hostile messages | sent | accepted | memory growth | honest result |", "|---|---:|---:|---:|---|"]
    lines += [
        f"| at the readers | {parser['messages']:,} | {parser['accepted']:,} | {parser['memory_mb']:.1f} MB | |",
        f"| through a broker | {live['messages']:,} | none | {live['memory_mb']:.1f} MB | equal to the simulation "
        f"({live['equal_to_simulation']} of {live['federations']} federations) |",
        "",
        f"Of the messages at the readers {parser['refused']:,} were refused; {parser['same']:,} still said what the "
        "honest message said: with spaces added where they mean nothing, or with other words in the free text of a "
        "report of trouble.",
        "",
        f"Dying devices: {dying['devices']} devices with {dying['clients']} clients, {dying['rounds']} rounds. "
        f"{dying['kills']['devices']} kills of devices (3 of 10 in each round), {dying['kills']['broker']} of the "
        f"broker, {dying['kills']['server']} of the server. The federation ended; {dying['answers_missing']} of "
        f"{dying['answers']} answers were missing; its server is bit-equal to the simulation with the same drop-outs.",
        "",
        f"Seed {parser['seed']}; {listed(told, 'machine')}; commit {listed(told, 'commit')} (of each: in the file); "
        f"torch {listed(told, 'torch')}; {listed(told, 'date')}; {sum(part['seconds'] for part in told.values()):,} s.",
    ]
    return "\n".join(lines) + "\n"


def listed(told: dict[str, Any], name: str) -> str:
    return ", ".join(dict.fromkeys(str(found[name]) for found in told.values()))


def write(source: Path = FIGURES, page: Path = PAGE) -> None:
    text = page.read_text(encoding="utf-8")
    made = figures(json.loads(source.read_text(encoding="utf-8")))
    page.write_text(BLOCK.sub(lambda _: made, text), encoding="utf-8")
