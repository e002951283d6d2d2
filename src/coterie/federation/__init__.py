"""The loop. It knows rounds, participants and scores, and no method."""

from coterie.federation.history import History, Round, Summary
from coterie.federation.result import Result
from coterie.federation.rounds import Safety, Settings, federate

__all__ = ["History", "Result", "Round", "Safety", "Settings", "Summary", "federate"]
