"""Training and test samples, where the data do not say which are which."""

from __future__ import annotations

import hashlib
import zlib

import numpy as np
from numpy.typing import NDArray

from coterie.data.own.reading import Array


def digests(x: Array) -> Array:
    """(n,) 16 bytes for each sample (n, ...); samples are equal where these are."""
    made = (hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in x)
    return np.array(list(made), dtype="V16") if len(x) else np.empty(0, "V16")


def choose_test(y: Array, copies: Array, share: float, seed: int, client: str) -> NDArray[np.bool_]:
    """(n,) which samples of a client are for testing: about `share` of each class, at random, never all of them.

    copies (n,): equal for equal samples, which stay together. The draw depends on the seed and the client's name.
    """
    _, first, same = np.unique(copies, return_index=True, return_inverse=True)
    draw = np.random.default_rng([seed, zlib.crc32(client.encode("utf-8", "replace"))])
    mixed = draw.permutation(len(first))
    order = mixed[np.argsort(y[first][mixed], kind="stable")]  # class by class, at random within
    steps = np.floor(np.arange(len(order) + 1) * share + 0.5)
    chosen = np.zeros(len(order), bool)
    chosen[order] = np.diff(steps) > 0  # evenly along the order: each class within 1 of its share
    if chosen.all():
        chosen[:1] = False
    return chosen[same.reshape(-1)]
