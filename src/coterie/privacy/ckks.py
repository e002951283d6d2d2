"""Encrypted vectors as bytes: encryption, decryption, and weighted sums without the secret key.

A vector is split into ciphertexts of 4096 numbers. Each is a row of bytes of fixed length: its length, a checksum, the
ciphertext, zeros. A fresh ciphertext can be multiplied once; a sum cannot be multiplied again.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.core.errors import CoterieError
from coterie.privacy.keys import SCALE, CkksKeys, tenseal

SLOTS = 4096  # numbers in a ciphertext
FRESH, SUM = 237_568, 131_328  # bytes of a row: as encrypted, and after the multiplication
LIMIT = 2.0**10  # largest number that can be encrypted
ROOM = 2.0**19  # a sum holds numbers below this: 60 bits of modulus less those of the scale, and the sign
MODULUS = 1_099_511_480_321  # SEAL's prime of 40 bits for this degree
UNIT = MODULUS / SCALE  # represents 1 in a product: SEAL divides it by the prime, tenseal by the scale
HEADER = struct.Struct("<II")  # length, CRC-32


class Term(NamedTuple):
    """A vector in a sum."""

    ciphertexts: Tensor  # (c, FRESH) as a client encrypted it, or (c, SUM) from a sum
    factor: float  # multiplier of its numbers after decryption
    whose: str  # for error messages

    @property
    def fresh(self) -> bool:
        return self.ciphertexts.shape[1] == FRESH


def encrypt(keys: CkksKeys, values: Tensor) -> Tensor:
    """(n,) numbers as (c, FRESH) bytes."""
    vector, context = tenseal().ckks_vector, keys.context()
    return torch.stack([row(vector(context, part.tolist()), FRESH) for part in torch.split(values.double(), SLOTS)])


def encrypt_known(keys: CkksKeys, values: Tensor) -> Tensor:
    """Public numbers in the form of a sum: (c, SUM)."""
    vector, context = tenseal().ckks_vector, keys.context()
    return torch.stack(
        [row(vector(context, part.tolist()) * UNIT, SUM) for part in torch.split(values.double(), SLOTS)]
    )


def decrypt(keys: CkksKeys, ciphertexts: Tensor, count: int) -> Tensor:
    """(..., count) numbers, float64, from (..., c, bytes). Needs the secret key."""
    *axes, found, width = ciphertexts.shape
    if found != -(-count // SLOTS):
        raise CoterieError(f"{count} weights need {-(-count // SLOTS)} ciphertexts, not {found}")
    keys.context(secret=True)
    values = decrypted(keys, ciphertexts.cpu().numpy().tobytes(), width)
    return values.view(*axes, found * SLOTS)[..., :count]


@lru_cache(maxsize=2)  # a client uses what it was sent several times, and in a simulation all clients get the same
def decrypted(keys: CkksKeys, content: bytes, width: int) -> Tensor:
    """(number of ciphertexts, SLOTS), padded with zeros."""
    context = keys.context(secret=True)
    values = torch.zeros(len(content) // width, SLOTS, dtype=torch.float64)
    for number, line in enumerate(values):
        numbers = load(context, content[number * width : (number + 1) * width], "what the server sent").decrypt()
        line[: len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
    return values


def row(vector: Any, width: int) -> Tensor:
    content: bytes = vector.serialize()
    if HEADER.size + len(content) > width:
        raise CoterieError(
            f"a ciphertext of {len(content)} bytes does not fit into {width}; unsupported version of tenseal?"
        )
    framed = HEADER.pack(len(content), zlib.crc32(content)) + content
    return torch.frombuffer(bytearray(framed.ljust(width, b"\0")), dtype=torch.uint8)


def whole(row: Tensor) -> bool:
    """Whether a row of bytes holds a ciphertext with the right checksum."""
    return unframed(row.numpy().tobytes()) is not None


def unframed(framed: bytes) -> bytes | None:
    """The ciphertext in a row; None if it is damaged."""
    length, checksum = HEADER.unpack_from(framed)
    content = framed[HEADER.size : HEADER.size + length]
    return content if length and len(content) == length and zlib.crc32(content) == checksum else None


def load(context: Any, framed: bytes, whose: str) -> Any:
    content = unframed(framed)
    if content is None:
        raise CoterieError(f"a ciphertext is damaged: {whose}")
    try:
        vector = tenseal().ckks_vector_from(context, content)
        vector.size()  # forces tenseal to parse now
    except (ValueError, RuntimeError) as error:
        raise CoterieError(f"a ciphertext cannot be used: {whose} ({error})") from None
    return vector


def combine(keys: CkksKeys, terms: Mapping[int, Term], coefficients: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted sums of vectors of the same length by coefficients (R, C): (R, c, SUM) bytes, and their factors (R,).

    terms: column -> vector, for the columns that are not zero. Fresh vectors are multiplied by their coefficients. Sums
    cannot be multiplied again, so their common coefficient is factored out: Σ c_j x_j = F Σ (c_j / F) x_j.
    """
    if not coefficients.isfinite().all():
        raise CoterieError("the coefficients of a sum are not finite: did all clients send a weight of zero?")
    rows = [plan(terms, {j: line[j] for j in terms if line[j]}) for line in coefficients.tolist()]
    context, parts = keys.context(), []
    for chunk in range(len(next(iter(terms.values())).ciphertexts)):
        loaded: dict[int, Any] = {}
        parts.append(torch.stack([added(context, terms, weights, chunk, loaded) for weights, _ in rows]))
    return torch.stack(parts, 1), torch.tensor([factor for _, factor in rows], dtype=torch.float64)


def plan(terms: Mapping[int, Term], coefficients: Mapping[int, float]) -> tuple[dict[int, float], float]:
    """The multiplier of each ciphertext, and the common factor outside."""
    for j in coefficients:
        if not math.isfinite(terms[j].factor):
            raise CoterieError(f"cannot add weights that are not finite: {terms[j].whose}")
    sums = [c * terms[j].factor for j, c in coefficients.items() if not terms[j].fresh]
    factor = sums[0] if sums else 1.0
    if any(abs(c - factor) > 1e-9 * abs(factor) for c in sums):
        raise CoterieError("sums of ciphertexts cannot be multiplied again by different coefficients")
    weights = {j: c * terms[j].factor / factor for j, c in coefficients.items()}
    weights = {j: c for j, c in weights.items() if abs(c) * SCALE >= 1}  # smaller ones are zero at this scale
    if abs(factor) < LIMIT / ROOM or sum(abs(c) for j, c in weights.items() if terms[j].fresh) > ROOM / LIMIT:
        most = ROOM / LIMIT
        raise CoterieError(
            f"a ciphertext cannot hold this sum: its coefficients add up to more than {most:g}, or the server's state "
            f"was scaled to less than 1/{most:g} of its encrypted value"
        )
    return weights, factor


def added(
    context: Any, terms: Mapping[int, Term], weights: dict[int, float], chunk: int, loaded: dict[int, Any]
) -> Tensor:
    """(SUM,) one ciphertext of one sum. loaded: a cache shared with other sums."""
    if len(weights) == 1:
        (only,) = weights
        if not terms[only].fresh:
            return terms[only].ciphertexts[chunk]  # unchanged
    total: Any = None
    for j, weight in weights.items():
        if j not in loaded:
            loaded[j] = load(context, terms[j].ciphertexts[chunk].cpu().numpy().tobytes(), terms[j].whose)
        try:
            part = loaded[j] * (weight * UNIT) if terms[j].fresh else loaded[j]
            total = part if total is None else total + part
        except (ValueError, RuntimeError) as error:
            raise CoterieError(f"a ciphertext cannot be used: {terms[j].whose} ({error})") from None
    if total is None:
        total = tenseal().ckks_vector(context, [0.0] * SLOTS) * UNIT
    return row(total, SUM)
