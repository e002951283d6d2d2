"""Where clients run: looped, stacked, on parallel streams, or on a Ray cluster."""

from coterie.execution.answers import Answers
from coterie.execution.backend import Backend, LocalBackend
from coterie.execution.looped import Looped
from coterie.execution.memory import ClientMemory
from coterie.execution.ray import Ray
from coterie.execution.requests import Request, Turn
from coterie.execution.scoring import Scores
from coterie.execution.stacked import Stacked
from coterie.execution.streams import Streams

__all__ = [
    "Answers",
    "Backend",
    "ClientMemory",
    "LocalBackend",
    "Looped",
    "Ray",
    "Request",
    "Scores",
    "Stacked",
    "Streams",
    "Turn",
]
