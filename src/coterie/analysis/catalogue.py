"""The catalogue of methods, from their code: family, messages, state, traffic, papers, and what they suit."""

from __future__ import annotations

import json
import typing
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

from coterie.analysis.citations import Description, described
from coterie.core.families import SITUATIONS
from coterie.core.method import AnyMethod
from coterie.core.tasks import TASKS
from coterie.methods import METHODS, VARIANTS

RECORDS = Path(__file__).parent / "behavior.json"
CLIENTS = 20  # of the federation in which bytes are counted
LITTLE = 0.5  # share of FedAvg's traffic below which a method needs little bandwidth
PRIVATE = ("dp-sample", "dp-client", "encrypt")


class Behavior(NamedTuple):
    """What a method does with its default settings, as tried by `coterie.analysis.behavior`."""

    sends: tuple[str, ...]  # words for what travels
    private: tuple[str, ...]  # the protections that it allows
    down: tuple[str, ...]  # fields that are sent to a client
    up: tuple[str, ...]
    has_global: bool  # whether the server has a model
    bytes_down: int  # one client in one round
    bytes_up: int
    model: int  # bytes of the whole model


@cache
def recorded() -> dict[str, Behavior]:
    """The recorded behavior of the built-in methods; `python -m tools.behavior` records it."""
    rows: dict[str, dict[str, Any]] = json.loads(RECORDS.read_text(encoding="utf-8"))
    return {name: Behavior(**{key: plain(value) for key, value in row.items()}) for name, row in rows.items()}


def plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True)
class MethodEntry:
    """A method with its default settings."""

    name: str
    method: AnyMethod

    @property
    def family(self) -> str:
        return self.method.family

    @cached_property
    def description(self) -> Description:
        return described(type(self.method))

    @property
    def year(self) -> int | None:
        return self.description.citation.year if self.description.citation else None

    @property
    def stays(self) -> tuple[str, ...]:
        """Fields of a client's state, without momentum."""
        return tuple(n for n in message(self.method, "client_init")._fields if "momentum" not in n)

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(name for name, task in TASKS.items() if task.one_class or not self.method.needs_classes)

    @property
    def variants(self) -> dict[str, str]:
        """Other names of the command line -> title."""
        return {variant: title for variant, (base, _, title) in VARIANTS.items() if base == self.name}

    @cached_property
    def behavior(self) -> Behavior:
        """As recorded; a method without a record is tried."""
        if self.name in recorded():
            return recorded()[self.name]
        from coterie.analysis.behavior import tried

        return tried(self.method)

    @property
    def share(self) -> float:
        """Bytes of a round, as a share of FedAvg's."""
        return (self.behavior.bytes_down + self.behavior.bytes_up) / (2 * self.behavior.model)

    def meets(self, situation: str) -> bool:
        """Whether the method suits a situation, by its own declaration or by what it does."""
        return situation in self.method.suits or self.derives(situation)

    def derives(self, situation: str) -> bool:
        match situation:
            case "many clients":  # where there is a final step, the state is what it makes
                stateless = self.method.personal_is_global and (not self.stays or self.method.finishes)
                return stateless and "few clients" not in self.method.suits
            case "new clients" | "global model":
                return self.behavior.has_global
            case "little bandwidth":
                return 0 < self.share < LITTLE
            case "privacy":
                return set(self.behavior.private) == set(PRIVATE)
            case "no classes needed":
                return not self.method.needs_classes
        return False

    def as_json(self) -> dict[str, Any]:
        citation = self.description.citation
        return {
            "name": self.name,
            "title": self.method.title,
            "family": self.family,
            "about": self.description.about,
            "paper": citation and citation._asdict(),
            **self.behavior._asdict(),
            "stays": self.stays,
            "results": dict(self.method.results),
            "tasks": self.tasks,
            "suits": tuple(word for word in SITUATIONS if self.meets(word)),
            "variants": self.variants,
        }


def entries() -> list[MethodEntry]:
    return [MethodEntry(name, kind()) for name, kind in METHODS.items()]


def message(method: AnyMethod, function: str) -> Any:
    """The type that a function of a method returns: `Down` of server_send, `State` of client_init."""
    return typing.get_type_hints(getattr(type(method), function))["return"]
