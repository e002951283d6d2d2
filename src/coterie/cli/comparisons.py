"""The folder of a comparison: what was asked, which runs are there already, what they came to."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
from pathlib import Path
from typing import Any

COMMAND = "command.json"  # what was asked; compare.json is what came of it, and is written last


def note_command(base: Path, chosen: argparse.Namespace, data: Any) -> None:
    """Make the folder. From then on the comparison can be resumed."""
    from coterie.api import fingerprint
    from coterie.core.errors import CoterieError
    from coterie.federation.disk import whole

    asked = {name: value for name, value in vars(chosen).items() if name != "act"}
    content = {"command": {**asked, "cwd": os.getcwd()}, "data": fingerprint(data)}
    try:
        base.mkdir(parents=True)
        with whole(base / COMMAND) as part:
            part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        with contextlib.suppress(OSError):
            base.rmdir()
        raise CoterieError(f"cannot make the folder {base}: {error.strerror}") from None


def read_command(base: Path) -> dict[str, Any]:
    from coterie.core.errors import CoterieError

    try:
        command = json.loads((base / COMMAND).read_text(encoding="utf-8"))["command"]
        if not {"methods", "cwd"} <= command.keys():
            raise ValueError("it does not say what was asked")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CoterieError(f"{base / COMMAND} cannot be read: {error}") from None
    return dict(command)


def write_outcomes(base: Path, table: dict[str, Any]) -> None:
    """All is there: the comparison is finished."""
    from coterie.core.errors import CoterieError
    from coterie.federation.disk import whole

    try:
        with whole(base / "compare.json") as part:
            part.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise CoterieError(
            f"all runs have ended, but {base} cannot be written to ({error.strerror}); when that is mended, "
            f"`coterie resume {base}` ends the comparison"
        ) from None


def check_data(base: Path, data: Any) -> None:
    """All runs of a comparison have the same samples."""
    from coterie.api import fingerprint
    from coterie.core.errors import CoterieError

    if json.loads((base / COMMAND).read_text(encoding="utf-8")).get("data") != fingerprint(data):
        raise CoterieError(f"the data are not those that the comparison in {base} began with")


def is_begun(out: Path) -> bool:
    """Whether this run can be resumed. What is left of one that was killed before it began is removed."""
    if (out / "config.json").exists() or not out.exists():
        return out.exists()
    (out / "config.json.part").unlink(missing_ok=True)
    out.rmdir()
    return False


def finished_rows(name: str, seed: int, out: Path) -> list[dict[str, Any]]:
    """Of a run that ended before; its seconds are those of its rounds."""
    from coterie.comparison import rows_of
    from coterie.federation import Summary
    from coterie.federation.history import POINTS, Outcome
    from coterie.personal.run import load_run

    told = json.loads((out / "result.json").read_text(encoding="utf-8"))
    points = {text: point for point, text in POINTS.items()}

    def number(value: float | None) -> float:
        return math.nan if value is None else value

    outcomes = [
        Outcome(
            o["name"],
            points[o["measured"]],
            Summary(**{name: number(value) for name, value in o["last"].items()}),
            number(o["best_on_test"]),
            o["best_by_validation"],
        )
        for o in told["outcomes"]
    ]
    return rows_of(name, seed, load_run(out).history, outcomes, sum(told["seconds"].values()), told["privacy"])
