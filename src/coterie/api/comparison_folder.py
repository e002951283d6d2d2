"""The folder of a comparison: the command that began it, its runs, and their outcomes."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from coterie.api.saved_run import load_run
from coterie.core.data import FederatedData
from coterie.core.errors import CoterieError
from coterie.federation import History
from coterie.federation.history import Outcome
from coterie.runs.describe import fingerprint
from coterie.runs.disk import read_inside, whole, writing
from coterie.runs.finding import discard_unstarted

COMMAND = "command.json"  # the command that began the comparison
OUTCOMES = "compare.json"  # written last: the comparison is finished


def note_command(base: Path, command: Mapping[str, Any], data: FederatedData) -> None:
    """Make the folder. From then on the comparison can be resumed."""
    content = {"command": {**command, "cwd": os.getcwd()}, "data": fingerprint(data)}
    try:
        base.mkdir(parents=True)
        write(base / COMMAND, content)
    except OSError as error:
        with contextlib.suppress(OSError):
            base.rmdir()
        raise CoterieError(f"cannot create the folder {base}: {error.strerror}") from None


def read_command(base: Path) -> dict[str, Any]:
    try:
        command = json.loads(read_inside(base, COMMAND))["command"]
        if not {"methods", "cwd"} <= command.keys():
            raise ValueError("it has no command")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CoterieError(f"{base / COMMAND} cannot be read: {error}") from None
    return dict(command)


def reopen_comparison(base: Path, length: Mapping[str, Any]) -> None:
    """Turn a finished comparison into an unfinished one whose runs have another length."""
    with writing(base):
        content = json.loads(read_inside(base, COMMAND))
        content["command"] = {k: v for k, v in {**content["command"], **length}.items() if v is not None}
        (base / OUTCOMES).unlink()
        write(base / COMMAND, content)


def begin_again(base: Path, command: Mapping[str, Any]) -> None:
    """Note another command for a comparison that began with the same data."""
    with writing(base):
        content = json.loads(read_inside(base, COMMAND))
        (base / OUTCOMES).unlink(missing_ok=True)
        write(base / COMMAND, {**content, "command": {**command, "cwd": os.getcwd()}})


def as_table(
    rows: Sequence[Mapping[str, Any]], data: FederatedData, folder: str, refused: Mapping[str, str]
) -> dict[str, Any]:
    """The content of compare.json. refused: method -> why it was left out."""
    about = {"data": data.name, "clients": data.num_clients, "metric": data.task.metric.name, "folder": folder}
    return {**about, "outcomes": rows, **({"refused": refused} if refused else {})}


def write_outcomes(base: Path, table: Mapping[str, Any]) -> None:
    """Write compare.json, which finishes the comparison."""
    try:
        write(base / OUTCOMES, table)
    except OSError as error:
        raise CoterieError(
            f"all runs have ended, but {base} cannot be written to ({error.strerror}); once this is fixed, "
            f"`coterie resume {base}` finishes the comparison"
        ) from None


def write(path: Path, content: Mapping[str, Any]) -> None:
    with whole(path) as part:
        part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def check_data(base: Path, data: FederatedData) -> None:
    """Raise an error for other samples than those that the comparison began with."""
    if not (base / COMMAND).exists():
        raise CoterieError(f"{base} is not the folder of a comparison that a command began; name another one")
    if json.loads(read_inside(base, COMMAND)).get("data") != fingerprint(data):
        raise CoterieError(f"the data are not those that the comparison in {base} began with")


def is_begun(out: Path) -> bool:
    """Whether this run can be resumed. The folder of one that was killed before it began is removed."""
    discard_unstarted(out)
    return out.exists()


class FinishedTraining(NamedTuple):
    """What a finished run in a folder says of itself."""

    history: History
    outcomes: list[Outcome]
    seconds: float  # of its rounds
    privacy: Mapping[str, Any] | None
    content: str  # the samples' checksum
    metrics: Mapping[str, Any] | None  # all metrics after the last round


def read_finished(out: Path) -> FinishedTraining:
    run = load_run(out)
    result = run.result or {}
    content = str(run.section("data")["content"])
    seconds = sum(result["seconds"].values())
    return FinishedTraining(run.history, run.outcomes(), seconds, run.privacy, content, result.get("metrics"))
