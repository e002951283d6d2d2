"""The configuration of the runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from coterie.report.elements import folded, section, table
from coterie.report.markup import Markup, tag
from coterie.report.naming import flat, named
from coterie.runs.run import Run

MANY = 8  # values of a setting that are shown


def configuration(runs: Sequence[Run]) -> Markup:
    """The configuration: first the settings that differ, then all."""
    names = [name for _, name, _ in named(runs)]
    found = [{"folder": str(run.path), **flat(run.config)} for run in runs]
    keys = list(dict.fromkeys(key for own in found for key in own))
    rows = [[key, *(shown(own.get(key)) for own in found)] for key in keys]
    facts = [row for row in rows if row[0] == "folder" or row[0].startswith("ran.")]
    differ = [row for row in rows if len(set(row[1:])) > 1 and row not in facts and not row[0].startswith("command.")]
    made = [table("Where and with what it ran", ["", *names], facts, words=True)]
    noisy = [(name, run.section("protection").get("privacy")) for name, run in zip(names, runs, strict=True)]
    if any(privacy for _, privacy in noisy):
        header = ["", "ε", "δ", "accountant", "of", "it covers", "not covered", "noise"]
        made.append(table("Differential privacy", header, [privacy_row(*one) for one in noisy], words=True))
    if differ:
        made.append(table("Settings that differ", ["setting", *names], differ, words=True))
    made.append(folded("All settings", table("All settings", ["setting", *names], rows, words=True)))
    logs = [
        folded(f"Log of {name}", tag("pre", run.log[-20_000:]))
        for run, name in zip(runs, names, strict=True)
        if run.log
    ]
    return section("settings", "What was run", *made, *logs)


def privacy_row(name: str, privacy: Any) -> list[str]:
    if not isinstance(privacy, dict):
        return [name, "none", "", "", "", "", "", ""]
    epsilon, delta = (
        f"{value:.4g}" if isinstance(value := privacy.get(part), int | float) else "" for part in ("epsilon", "delta")
    )
    missing = privacy.get("not_covered")
    words = ", ".join(map(str, missing)) if isinstance(missing, list) else ""
    about = (shown(privacy.get(part)) for part in ("accountant", "neighbour", "covers"))
    return [name, epsilon, delta, *about, words, shown(privacy.get("noise"))]


def shown(value: Any) -> str:
    """A setting as text, with long lists shortened."""
    if isinstance(value, list) and len(value) > MANY:
        numbers = [v for v in value if isinstance(v, int | float)]
        return f"{len(value)} values" + (f", {min(numbers)} to {max(numbers)}" if numbers else "")
    return "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
