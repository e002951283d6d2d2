"""Where a row's settings come from: the paper, its code, a default, or a comparison with published numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from coterie.core.errors import CoterieError, unknown
from coterie.core.validation import MappingReader, fitting, read_yaml

FITTED = "fitted"
READINGS = {  # by the weakest link among everything that decides a row's number
    "stated": "the paper's text determines the row",
    "code": "the authors' code settles what the text leaves open",
    "default": "neither does; a default was chosen before comparing with published numbers",
    FITTED: "chosen among several after comparing with published numbers",
}
SHARED = Path(__file__).parent / "inferences.yaml"


@dataclass(frozen=True)
class Inference:
    """One choice among several readings, made by comparing them with published numbers."""

    name: str
    what: str
    fitted_on: tuple[tuple[str, str], ...]  # cells that decided: (recipe, row)
    tried: int  # readings that were compared


@dataclass(frozen=True)
class RowReading:
    kind: str  # one of READINGS
    inferences: tuple[Inference, ...] = ()  # of a fitted row

    @property
    def tried(self) -> int:
        """Number of combinations of readings that were open to choice."""
        return math.prod(inference.tried for inference in self.inferences)

    @property
    def fitted_on(self) -> set[tuple[str, str]]:
        return {cell for inference in self.inferences for cell in inference.fitted_on}


Inferences = dict[str, Inference]


@cache
def shared() -> Inferences:
    """The inferences of Coterie's own recipes."""
    return read_yaml(SHARED, partial(read_inferences, ""))


def read_inferences(where: str, content: Any) -> Inferences:
    """Name -> what was chosen, the cells that decided, and how many readings were compared."""
    found = {}
    for name, entry in MappingReader(where, content).left.items():
        keys = MappingReader(f"{where}{name}: ", entry)
        what, tried = keys.take("what", str), keys.take("tried", int)
        on = MappingReader(f"{where}{name}: fitted_on: ", keys.take("fitted_on", dict))
        cells = tuple((recipe, row) for recipe in list(on.left) for row in on.take(recipe, tuple[str, ...]))
        keys.close()
        if tried < 2 or not cells:
            raise CoterieError(f"{where}{name}: needs at least one cell in fitted_on, and tried of at least 2")
        found[name] = Inference(name, what, cells, tried)
    return found


def read_reading(where: str, content: Any, known: Inferences) -> RowReading:
    """stated, code or default; or {fitted: [names of inferences]}."""
    if isinstance(content, str):
        if content == FITTED:
            raise CoterieError(f"{where} must name its inferences, as {{fitted: [NAME, ...]}}")
        if content not in READINGS:
            raise unknown(where, content, READINGS)
        return RowReading(content)
    keys = MappingReader(f"{where}: ", content)
    names = fitting(f"{where}: {FITTED}", keys.take(FITTED, list), tuple[str, ...])
    keys.close()
    if not names:
        raise CoterieError(f"{where}: {FITTED} is empty")
    for name in names:
        if name not in known:
            raise unknown(f"{where}: {FITTED}", name, known)
    return RowReading(FITTED, tuple(known[name] for name in names))
