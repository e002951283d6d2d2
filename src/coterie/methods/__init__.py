"""The papers. One file each; nothing elsewhere is about one method only."""

from __future__ import annotations

from typing import Any

from coterie.core.method import Method
from coterie.methods.ditto import Ditto
from coterie.methods.fedavg import FedAvg
from coterie.methods.fedpac import FedPAC
from coterie.methods.fedper import FedPer
from coterie.methods.fedrep import FedRep
from coterie.methods.local import Local

AnyMethod = Method[Any, Any, Any, Any]

METHODS: dict[str, type[AnyMethod]] = {
    "local": Local,
    "fedavg": FedAvg,
    "fedper": FedPer,
    "fedrep": FedRep,
    "ditto": Ditto,
    "fedpac": FedPAC,
}

# Names for settings that the papers give a name: its method, what differs, and its title.
VARIANTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "fedavg-ft": ("fedavg", {}, "FedAvg-FT"),
    "fedpac-none": ("fedpac", {"align": 0.0, "combine": False}, "FedPAC (none)"),
    "fedpac-fa": ("fedpac", {"combine": False}, "FedPAC (alignment only)"),
    "fedpac-cc": ("fedpac", {"align": 0.0}, "FedPAC (combination only)"),
}
