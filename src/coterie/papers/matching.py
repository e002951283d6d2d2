"""Whether a stored result is one of a training: their settings are compared, not their hashes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from coterie.api import VARY
from coterie.papers.recipes import Plan


def asked_by(plan: Plan) -> Callable[[dict[str, Any]], bool]:
    """A predicate: whether a result is one of this training. Partitions that vary have the seed of the training."""
    wanted, usual = (json.loads(json.dumps(settings)) for settings in (plan.settings, plan.usual))

    def fits(content: dict[str, Any]) -> bool:
        made, asked = (with_seed(settings, content["seed"]) for settings in (content["settings"], wanted))
        return covers(made, asked, usual)

    return fits


def with_seed(settings: dict[str, Any], seed: int) -> dict[str, Any]:
    """Replace the seed of a partition that varies by the one that it had."""
    partition = settings.get("partition")
    if not isinstance(partition, dict) or partition.get("seed") != VARY:
        return settings
    return {**settings, "partition": {**partition, "seed": seed}}


def covers(made: Any, wanted: Any, usual: Any) -> bool:
    """Whether settings of a result are the wanted ones; missing ones count as their defaults."""
    if not isinstance(made, dict) or not isinstance(wanted, dict):
        return bool(made == wanted)
    usual = usual if isinstance(usual, dict) else {}
    return made.keys() <= wanted.keys() and all(
        covers(made[name], value, usual.get(name)) if name in made else name in usual and value == usual[name]
        for name, value in wanted.items()
    )
