"""Hyper-parameter search on a validation split; test samples are not used."""

from coterie.tuning.search import tune
from coterie.tuning.standings import Tuned

__all__ = ["Tuned", "tune"]
