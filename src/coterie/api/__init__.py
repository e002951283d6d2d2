"""What `import coterie` offers: names become data, models and methods, and a run becomes a result."""

from coterie.analysis.lookup import method_name
from coterie.api.data import RULE_SETTINGS, VARY, DataSettings, find_data, load_clients
from coterie.api.driving import drive
from coterie.api.methods import About, choose, federate, make_method, resolve
from coterie.api.public import run
from coterie.api.running import execute, guarantee
from coterie.execution.choice import Execution, fastest, place, ready
from coterie.models import make_network
from coterie.runs.describe import describe, facts, fingerprint, portrait

__all__ = [
    "RULE_SETTINGS",
    "VARY",
    "About",
    "DataSettings",
    "Execution",
    "choose",
    "describe",
    "drive",
    "execute",
    "facts",
    "fastest",
    "federate",
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
    "resolve",
    "run",
]
