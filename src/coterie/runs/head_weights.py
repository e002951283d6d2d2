"""Head weights that FedPAC's server reported, read from reports.npz."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.data.partition import arrays_of


class HeadWeights(NamedTuple):
    """Row i: the weight of each client's head in the combined head of clients[i]."""

    round: int
    clients: tuple[int, ...]  # (S,)
    matrix: NDArray[np.float64]  # (S, S)


def read_head_weights(
    content: bytes, trained: Mapping[int, Sequence[int]], num_clients: int, groups: Sequence[int]
) -> list[HeadWeights]:
    """Of the rounds whose participants are known; clients are sorted by group. trained: round -> its participants."""
    found = []
    arrays = arrays_of(io.BytesIO(content))
    for name in sorted(n for n in arrays if n.startswith("head_weights/")):
        matrix, number = np.asarray(arrays[name], np.float64), int(name.rsplit("/", 1)[1])
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
            raise ValueError(f"{name} is not square")
        ids = trained.get(number) or range(num_clients)
        if len(ids) == len(matrix) > 0 and np.isfinite(matrix).all():
            known = dict(enumerate(groups)) if len(groups) == num_clients else {}  # differs if some clients join later
            order = sorted(range(len(ids)), key=lambda i: known.get(ids[i], 0))
            found.append(HeadWeights(number, tuple(ids[i] for i in order), matrix[np.ix_(order, order)]))
    return found
