"""Where clients run."""

from coterie.clients.base import Answers, Clients, Job, Resident, Scores, Turn
from coterie.clients.batched import Batched
from coterie.clients.looped import Looped
from coterie.clients.ray import Ray
from coterie.clients.states import States

__all__ = ["Answers", "Batched", "Clients", "Job", "Looped", "Ray", "Resident", "Scores", "States", "Turn"]
