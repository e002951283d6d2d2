"""Whether a method supports a protection: what its class declares, checked by its behavior."""

from __future__ import annotations

from typing import Any

from coterie.core.protections import Protections
from coterie.privacy.judge import JUDGES

NOT_DECLARED = (
    "its class does not declare it in `protections`: what its messages reveal of a client has not been checked; see "
    "docs/add-a-method.md"
)
NO_STATISTICS = "it sends no class statistics"
DEFAULTS = {"dp-client": NOT_DECLARED, "dp-sample": NOT_DECLARED}
DEFAULTS |= {"dp-statistics": NO_STATISTICS, "dp-both": NO_STATISTICS}


def verdict(kind: str, method: Any) -> str | None:
    """Why a method does not support a protection; None if it does. Declarations are checked by behavior."""
    rules: Protections = method.protections
    reason = rules[kind](method) if kind in rules else DEFAULTS.get(kind)
    if reason is not None or kind not in JUDGES:
        return reason
    return JUDGES[kind](method)
