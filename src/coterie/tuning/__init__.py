"""Search of hyper-parameters by a validation split. The test samples have no part in it."""

from coterie.tuning.search import tune
from coterie.tuning.standings import Tuned

__all__ = ["Tuned", "tune"]
