"""Which samples are for testing, where a publisher does not say or splits by client."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]


def every_fourth(stratum: NDArray[np.int64]) -> Mask:
    """(N,) True for every fourth member of each stratum."""
    chosen = np.zeros(len(stratum), bool)
    for value in np.unique(stratum):
        chosen[np.flatnonzero(stratum == value)[3::4]] = True
    return chosen


def last_quarter(stratum: NDArray[np.int64], gap: int = 0) -> tuple[Mask, Mask]:
    """(N,) which samples are used, and which are for testing: the last quarter of each stratum.

    gap: samples of a stratum before its test samples that are left out.
    """
    kept, test = np.ones(len(stratum), bool), np.zeros(len(stratum), bool)
    for value in np.unique(stratum):
        own = np.flatnonzero(stratum == value)
        first = len(own) - len(own) // 4
        test[own[first:]] = True
        if first < len(own):
            kept[own[max(0, first - gap) : first]] = False
    return kept, test
