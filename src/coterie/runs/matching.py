"""Compare configurations: which settings must be equal for a run to be resumed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from coterie.core.errors import CoterieError

# Sections and settings by dotted name. The number of rounds and what follows from it may change: runs can be extended.
DECISIVE = ("method", "task", "protection", "encryption", "model", "data", "federation", "execution.precision",
         "execution.cohort", "execution.deterministic", "ran.backend", "ran.device", "ran.coterie",
         "ran.torch")  # fmt: skip
FREE = ("federation.rounds", "protection.privacy")


def same(before: Mapping[str, str], now: Mapping[str, str], what: str = "run") -> None:
    """Raise an error that names the settings that differ."""
    differ = [
        f"{name} was {before.get(name, 'not set')} and is {now.get(name, 'not set')}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]
    if differ:
        more = f", and {len(differ) - 5} more" if len(differ) > 5 else ""
        raise CoterieError(f"this is not the {what} that was started: {'; '.join(differ[:5])}{more}")


def decisive(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The settings that must be equal, as text; long values as their checksum."""
    for name, value in dotted(config):
        if within(name, DECISIVE) and not within(name, FREE):
            text = json.dumps(value)
            yield name, text if len(text) <= 80 else f"content {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def within(name: str, parts: Sequence[str]) -> bool:
    return any(name == part or name.startswith(f"{part}.") for part in parts)


def dotted(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(config, Mapping):
        yield prefix, config
        return
    for name, value in config.items():
        yield from dotted(value, f"{prefix}.{name}" if prefix else str(name))
