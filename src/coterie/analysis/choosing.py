"""Choose among the methods: filters, and suggestions for situations."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from coterie.analysis.catalogue import PRIVATE, MethodEntry
from coterie.analysis.contents import CONTENTS
from coterie.core.errors import CoterieError, unknown
from coterie.core.families import DERIVED, FAMILIES, SITUATIONS
from coterie.core.names import spelling
from coterie.core.tasks import TASKS


def word(what: str, text: str, known: Iterable[str]) -> str:
    """The known word that is spelled like this one (label-shift, Label Shift)."""
    names = {spelling(name): name for name in known}
    if spelling(text) not in names:
        raise unknown(what, text, names.values())
    return names[spelling(text)]


def years(text: str) -> tuple[int, int]:
    """First and last year of 2021, 2021-2023, 2021- or -2023."""
    found = re.fullmatch(r"(\d{4})?(-?)(\d{4})?", text)
    if not found or not (found[1] or found[3]) or bool(found[1] and found[3]) > bool(found[2]):
        raise CoterieError(f"--year must be a year or a range such as 2021-2023, got '{text}'")
    first = int(found[1] or 0)
    last = int(found[3]) if found[3] else 9999 if found[2] else first
    if first > last:
        raise CoterieError(f"--year {text}: the first year is after the last; use {last}-{first}")
    return first, last


@dataclass(frozen=True)
class Filters:
    """What listed methods must be; empty: anything."""

    family: str = ""
    year: str = ""
    task: str = ""
    private: str = ""
    sends: str = ""
    suits: Sequence[str] = ()
    needs: Sequence[str] = ()
    traffic: float | None = None  # at most this share of FedAvg's

    def chosen(self, listed: Iterable[MethodEntry]) -> list[MethodEntry]:
        family = self.family and word("family", self.family, FAMILIES)
        first, last = years(self.year) if self.year else (0, 9999)
        task = self.task and word("task", self.task, TASKS)
        private = self.private and word("protection", self.private, PRIVATE)
        sends = self.sends and word("content of messages", self.sends, CONTENTS)
        suits = situations(self.suits)
        needs = [word("need", text, NEEDS) for text in self.needs]
        if self.traffic is not None and not self.traffic >= 0:
            raise CoterieError(f"--traffic must be at least 0, got {self.traffic:g}; 1 is what FedAvg sends")
        return [
            e
            for e in listed
            if (not family or e.family == family)
            and (not self.year or first <= (e.year or -1) <= last)
            and (not task or task in e.tasks)
            and (not sends or sends in e.behavior.sends)
            and all(e.meets(situation) for situation in suits)
            and (not private or private in e.behavior.private)
            and all(needed(e, need) for need in needs)
            and (self.traffic is None or e.share <= self.traffic)
        ]


def situations(asked: Iterable[str]) -> list[str]:
    return [word("situation", text, SITUATIONS) for text in asked]


class Suggestion(NamedTuple):
    entry: MethodEntry
    met: list[str]  # situations
    reason: str


def suggestions(listed: Sequence[MethodEntry], asked: Sequence[str]) -> list[Suggestion]:
    """Methods for all of these situations; if there is none, those for the most of them. The best is first.

    A method that is designed for a situation goes before one whose properties suit it; then newer papers go first, or,
    for little bandwidth, less traffic.
    """
    wanted = situations(asked)
    if not wanted:
        raise CoterieError(f"--suggest needs a situation, one or several of: {', '.join(SITUATIONS)}")
    met = {e.name: [situation for situation in wanted if e.meets(situation)] for e in listed}
    most = max(map(len, met.values()), default=0)

    def rank(e: MethodEntry) -> tuple[float, ...]:
        designed = sum(situation in e.method.suits for situation in met[e.name])
        return -designed, e.share if "little bandwidth" in wanted else 0, -(e.year or 0)

    found = sorted((e for e in listed if most and len(met[e.name]) == most), key=rank)
    return [Suggestion(e, met[e.name], reason(e, met[e.name])) for e in found]


def reason(entry: MethodEntry, met: Sequence[str]) -> str:
    """The situations that the method is designed for, properties that suit others, its needs, and what it does."""
    designed = [situation for situation in met if situation in entry.method.suits]
    said = [f"designed for {', '.join(designed)}"] if designed else []
    said += [*(derived(entry, s) for s in met if s not in designed), *needs(entry)]
    said += [entry.description.about.rstrip(".")] if designed else []
    return " ".join(f"{sentence[0].upper()}{sentence[1:]}." for sentence in said)


def derived(entry: MethodEntry, situation: str) -> str:
    if situation == "little bandwidth":
        return f"it sends {entry.share:.1%} of what FedAvg sends"
    return DERIVED[situation]


NEEDS: Mapping[str, str] = {
    "classes": "one class per sample",
    "norm": "normalization layers",
    "sgd": "optimizer sgd",
    "head": "a head that is trained",
    "encoder": "an encoder that is trained",
}
USUAL = ("head", "encoder")  # what every network has, unless it is frozen


def needed(entry: MethodEntry, need: str) -> bool:
    return bool(getattr(entry.method, f"needs_{need}"))


def needs(entry: MethodEntry) -> list[str]:
    found = [what for need, what in NEEDS.items() if needed(entry, need) and need not in USUAL]
    return [f"needs {', '.join(found)}"] if found else []


def by_traffic(listed: Iterable[MethodEntry]) -> list[MethodEntry]:
    """The least traffic first."""
    return sorted(listed, key=lambda e: e.share)


def grouped(listed: Iterable[MethodEntry]) -> dict[str, list[MethodEntry]]:
    """Methods by family, in the order of FAMILIES; without empty families."""
    groups: dict[str, list[MethodEntry]] = {family: [] for family in FAMILIES}
    for e in listed:
        groups[e.family].append(e)
    return {family: group for family, group in groups.items() if group}
