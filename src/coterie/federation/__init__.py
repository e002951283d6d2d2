"""The loop: rounds, participation, evaluation, newcomers, history. It knows no method."""

from coterie.federation.ending import Ending
from coterie.federation.history import Ended, History, Round, Summary
from coterie.federation.rounds import federate
from coterie.federation.settings import Safety, Settings

__all__ = ["Ended", "Ending", "History", "Round", "Safety", "Settings", "Summary", "federate"]
