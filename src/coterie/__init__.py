"""Coterie: personalized federated learning. Many clients learn together, each ends up with its own model."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from coterie.version import VERSION as __version__

if TYPE_CHECKING:
    from coterie.api import DataSettings, Execution, load_clients, make_method, run
    from coterie.core.errors import CoterieError
    from coterie.data.own import clients_from
    from coterie.federation import Result
    from coterie.personal.run import load_run
    from coterie.tuning import tune

__all__ = [
    "CoterieError",
    "DataSettings",
    "Execution",
    "Result",
    "__version__",
    "clients_from",
    "load_clients",
    "load_run",
    "make_method",
    "run",
    "tune",
]

_HOMES = {
    "CoterieError": "coterie.core.errors",
    "Result": "coterie.federation",
    "clients_from": "coterie.data.own",
    "load_run": "coterie.personal.run",
    "tune": "coterie.tuning",
}


def __getattr__(name: str) -> Any:
    """Found when first asked for, so that `coterie --help` need not wait for torch."""
    if name not in __all__:
        raise AttributeError(f"module 'coterie' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES.get(name, "coterie.api")), name)
