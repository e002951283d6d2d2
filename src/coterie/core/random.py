"""All randomness, as data: a counter-based hash of (seed, round, client, epoch, sample).

Nothing here has a state, so looped, stacked and remote clients draw the same numbers, and a resumed run continues with
the numbers it would have drawn. The hash is the finalizer of splitmix64 on int64 tensors. It is invertible and
not cryptographic: what must be secret, such as noise for privacy, comes from privacy/noise.py.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
_MIX1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX2 = -7723592293110705685  # 0x94D049BB133111EB

# Purposes of draws; different purposes draw different numbers.
PARTICIPANTS, SHUFFLE, AUGMENT, DROPOUT, SPLIT, REBALANCE, EXPLORE, NEWCOMERS, NOISE, DRAW, SERVER = range(11)


K = TypeVar("K", Tensor, int)  # int64 tensors, or integers in the range of int64: a few tensor operations take longer


def scramble(x: K) -> K:
    """A bijection of int64 with well-mixed bits."""
    x = _wrap((x ^ _shift(x, 30)) * _MIX1)
    x = _wrap((x ^ _shift(x, 27)) * _MIX2)
    return x ^ _shift(x, 31)


def _shift(x: K, by: int) -> K:
    return (x >> by) & ((1 << (64 - by)) - 1)  # a logical shift: torch's is arithmetic


@overload
def derive(key: int, *numbers: int) -> int: ...
@overload
def derive(key: Tensor, *numbers: Tensor | int) -> Tensor: ...
def derive(key: Any, *numbers: Any) -> Any:
    """The key of a narrower context: derive(seed, round), derive(that, client), ..."""
    for number in numbers:
        key = scramble(_wrap(key + _wrap(number * _GOLDEN + _GOLDEN)))
    return key


def _wrap(x: K) -> K:
    """As int64 arithmetic would, which tensors have."""
    return x if isinstance(x, Tensor) else (x + (1 << 63)) % (1 << 64) - (1 << 63)


def seed_key(seed: int, *numbers: int) -> Tensor:
    """() the key of a seed, or derive(that, *numbers)."""
    return torch.tensor(derive(scramble(_wrap(seed)), *numbers), dtype=torch.int64)


def server_key(seed: int, round: int) -> Tensor:
    """() random key of the server in a round; ~: no client draws from this stream."""
    return seed_key(~seed, SERVER, round)


def bits(key: Tensor, samples: Tensor) -> Tensor:
    """63 random bits for each sample number, as non-negative int64."""
    return derive(key, samples) & ((1 << 63) - 1)


def normal(key: Tensor, like: Tensor) -> Tensor:
    """Independent standard normal numbers in the shape of a tensor (Box-Muller)."""
    pairs = (like.numel() + 1) // 2
    draws = bits(key, torch.arange(2 * pairs, device=key.device)) >> 10
    uniform = (draws.double() + 0.5) * 2.0**-53  # in (0, 1)
    radius, angle = (-2 * uniform[:pairs].log()).sqrt(), 2 * math.pi * uniform[pairs:]
    drawn = torch.cat([radius * angle.cos(), radius * angle.sin()])
    return drawn[: like.numel()].view(like.shape).to(like.dtype)


def uniform(keys: Tensor) -> Tensor:
    """A number in [0, 1) for each key, in float64."""
    return (bits(keys, torch.zeros_like(keys)) >> 10).double() * 2.0**-53


def normals(keys: Tensor, size: int) -> Tensor:
    """(B, size) independent standard normal numbers for each of the keys (B,), in float64 (Box-Muller)."""
    pairs = (size + 1) // 2
    draws = bits(keys[:, None], torch.arange(2 * pairs, device=keys.device)) >> 10  # (B, 2 pairs)
    uniform = (draws.double() + 0.5) * 2.0**-53  # in (0, 1)
    radius, angle = (-2 * uniform[:, :pairs].log()).sqrt(), 2 * math.pi * uniform[:, pairs:]
    return torch.cat([radius * angle.cos(), radius * angle.sin()], 1)[:, :size]


def categories(keys: Tensor, shares: Tensor) -> Tensor:
    """(B,) a category for each of the keys (B,), with probabilities in proportion to shares (K,)."""
    edges = shares.double().cumsum(0)
    return (uniform(keys)[:, None] * edges[-1] >= edges[:-1]).sum(1)


def shuffle(key: Tensor, n: int, real: Tensor | None = None) -> Tensor:
    """(n,) a random order of n samples; the real ones first, in the order they would have without padding."""
    draws = bits(key, torch.arange(n, device=key.device))
    if real is not None:
        draws = torch.where(real, draws, torch.iinfo(torch.int64).max)
    return torch.argsort(draws)


def participants(seed: int, round: int, clients: int, joining: int) -> Tensor:
    """(joining,) sorted ids of the clients of a round, drawn without replacement."""
    return shuffle(seed_key(seed, PARTICIPANTS, round), clients)[:joining].sort().values
