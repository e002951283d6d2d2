"""Resume and extend runs: whether a run is finished, and what changes when it gets more rounds.

More rounds leave the completed ones unchanged, since participants, randomness and learning rates depend only on the
number of the round. What belongs to the end is repeated at the new end: the measurement of a last round that is not a
multiple of `evaluate_every`, the full last round, the final step of a method, and new clients.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from coterie.core.errors import CoterieError
from coterie.core.schedules import read_schedule
from coterie.federation.ending import Ending
from coterie.federation.history import Ended, History, Round
from coterie.federation.settings import Settings
from coterie.runs.checksums import RunFiles
from coterie.runs.config import read_config, read_object
from coterie.runs.folder import Folder


def ended_of(path: Path) -> Ended | None:
    """Why and when the run in this folder ended; None if it has not ended."""
    try:
        result = read_object(RunFiles(path).read("result.json"))
        return Ended(*result["ended"].values())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CoterieError(f"{path / 'result.json'} cannot be read: {error}") from None


def remains(path: Path, rounds: int | None, ending: Ending) -> bool:
    """Whether the run in this folder is incomplete for this total number of rounds (None: as planned).

    A run that was stopped or reached its time limit continues. One that a condition ended continues if that changed.
    """
    ended, before = ended_of(path), read_config(path)
    if ended is None:
        return True
    planned = before["federation"]["rounds"]
    rounds = planned if rounds is None else rounds
    if rounds < ended.round:
        raise too_few(path, ended.round, rounds)
    if rounds == ended.round:
        return False
    same = planned == rounds and before.get("ending") == asdict(ending)
    return ended.reason in ("rounds", "max_time") or not same


def unfinished(folder: Folder, settings: Settings, ending: Ending, elsewhere: bool) -> bool:
    """The same for an open folder. elsewhere: clients are devices, which end when the server does."""
    planned = folder.before["federation"]["rounds"]
    if elsewhere and ended_of(folder.path):
        raise CoterieError(f"{folder.path} is finished; there is nothing to continue")
    if elsewhere and planned != settings.rounds:
        raise CoterieError(f"the devices agreed on {planned} rounds; a federation of devices cannot be extended")
    if settings.aggregate_last_round and planned != settings.rounds:
        raise CoterieError(f"all clients took part in round {planned}, the last one; such a run cannot be extended")
    schedule = folder.before["method"]["train"].get("schedule", "constant")
    if planned != settings.rounds and read_schedule(schedule).rounds.spans:
        raise CoterieError(
            f"the learning rates of --schedule {schedule} depend on the number of rounds, {planned}; such a run cannot "
            "be extended"
        )
    return remains(folder.path, settings.rounds, ending)


def extended(folder: Folder, history: History, settings: Settings) -> History:
    """Reopen the folder and return the history to continue from. On errors, nothing is changed.

    history: of the last checkpoint.
    """
    ended = ended_of(folder.path)
    if ended and len(history) < ended.round:
        raise CoterieError(
            f"{folder.path} cannot be extended: the state after its last round was not kept (--no-keep-state, "
            f"--checkpoint-every 0, or an earlier version of Coterie). Start a new run with --rounds {settings.rounds}"
        )
    if len(history) > settings.rounds:
        raise too_few(folder.path, len(history), settings.rounds)
    folder.reopen(len(history))
    return History(as_planned(record, settings) for record in history)


def as_planned(record: Round, settings: Settings) -> Round:
    """Drop the measurement of a round that was the last one but no longer is."""
    due = record.number % settings.evaluate_every == 0 or record.number == settings.rounds
    return record if due else replace(record, scores={})


def too_few(path: Path, completed: int, rounds: int) -> CoterieError:
    return CoterieError(f"{path} has completed {completed} rounds; rounds must be at least that, got {rounds}")
