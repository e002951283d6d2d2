"""The parts joined: names become data, models and methods, and a run becomes a result."""

from coterie.api.about import describe, facts, fingerprint, portrait
from coterie.api.data import RULE_SETTINGS, DataSettings, find_data, load_clients
from coterie.api.execution import Execution, fastest, make_network, place, ready
from coterie.api.methods import choose, make_method, method_name
from coterie.api.running import drive, guarantee, run

__all__ = [
    "RULE_SETTINGS",
    "DataSettings",
    "Execution",
    "choose",
    "describe",
    "drive",
    "facts",
    "fastest",
    "find_data",
    "fingerprint",
    "guarantee",
    "load_clients",
    "make_method",
    "make_network",
    "method_name",
    "place",
    "portrait",
    "ready",
    "run",
]
