"""Dataclasses that know which of their fields the caller set: a protocol fills in the others, and only those."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, Self

from coterie.core.validation import check_fields


class Explicit:
    """Base of frozen dataclasses that remember the fields passed to their constructor.

    The record is no field: comparison, `repr`, `asdict` and the methods' code do not see it. `dataclasses.replace`
    passes every field, so all fields of its result count as set; `but` keeps the record.
    """

    _explicit: frozenset[str]

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        made = super().__new__(cls)
        known = [f.name for f in fields(cls) if f.init]  # type: ignore[arg-type]
        passed = dict(zip(known, args, strict=False)) | {name: settings[name] for name in known if name in settings}
        check_fields(cls, passed)
        object.__setattr__(made, "_explicit", frozenset(passed))
        return made

    @property
    def explicit(self) -> frozenset[str]:
        """Names of the fields that were set."""
        return self._explicit

    def but(self, **changes: Any) -> Self:
        """A copy with these fields set to other values."""
        made = replace(self, **changes)  # type: ignore[type-var]
        object.__setattr__(made, "_explicit", self._explicit | changes.keys())
        return made
