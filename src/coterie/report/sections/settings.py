"""The configuration of the runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from coterie.report.elements import folded, paragraph, section, table
from coterie.report.markup import Markup, join, tag
from coterie.report.naming import flat, named
from coterie.report.seeds import labeled_runs
from coterie.runs.stored_run import StoredRun

MANY = 8  # values of a setting that are shown


def configuration(runs: Sequence[StoredRun]) -> Markup:
    """The configuration: where it ran, then the settings that differ, then all. Seeds of a method are one column."""
    columns = labeled_runs(runs)
    found = [[{"folder": str(run.folder), **flat(run.config)} for run in group] for group in columns.values()]
    keys = list(dict.fromkeys(key for group in found for own in group for key in own))
    rows = [[key, *(joined([shown(own.get(key)) for own in group]) for group in found)] for key in keys]
    facts = [row for row in rows if row[0] == "folder" or row[0].startswith("ran.")]
    same = [row for row in facts if len(set(row[1:])) == 1 and len(columns) > 1]
    differ = [row for row in rows if len(set(row[1:])) > 1 and row not in facts and not row[0].startswith("command.")]
    words = " · ".join(f"{row[0].removeprefix('ran.')} {row[1]}" for row in same)
    made = [paragraph(words, class_="small")] if words else []
    where = table("Where and with what it ran", ["", *columns], [row for row in facts if row not in same], words=True)
    made.append(where if len(runs) == 1 else folded("Where and with what each run was made", where))
    noisy = [(name, group[0].section("protection").get("privacy")) for name, group in columns.items()]
    if any(privacy for _, privacy in noisy):
        header = ["", "ε", "δ", "accountant", "of", "it covers", "not covered", "noise"]
        made.append(table("Differential privacy", header, [privacy_row(*one) for one in noisy], words=True))
    if differ:
        made.append(folded("Settings that differ", table("Settings that differ", ["setting", *columns], differ, True)))
    made.append(folded("All settings", table("All settings", ["setting", *columns], rows, words=True)))
    return section("settings", "What was run", *made, logs(runs))


def logs(runs: Sequence[StoredRun]) -> Markup:
    """The end of each log, folded; of several runs, in one more fold."""
    made = [
        folded(f"Log of {name}", tag("pre", run.log[-20_000:], tabindex="0")) for run, name in named(runs) if run.log
    ]
    return join(*made) if len(made) < 2 else folded("Logs", *made)


def joined(values: Sequence[str]) -> str:
    """The values of several seeds, each once."""
    return "\n".join(dict.fromkeys(values))


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
