"""Where clients run."""

from coterie.clients.base import Answers, Clients, Scores, Turn
from coterie.clients.batched import Batched
from coterie.clients.looped import Looped

__all__ = ["Answers", "Batched", "Clients", "Looped", "Scores", "Turn"]
