"""The hash against a plain integer implementation, and what is drawn with it."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from coterie.core import random

MASK = (1 << 64) - 1


def splitmix(x: int) -> int:
    """Steele, Lea, Flood 2014: the finaliser, on Python's integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def test_the_hash_is_splitmix64() -> None:
    for x in (0, 1, 12345, MASK, 1 << 63, 0x9E3779B97F4A7C15):
        assert int(random.scramble(torch.tensor(signed(x)))) == signed(splitmix(x))
    assert (
        int(random.scramble(torch.tensor(signed(0x9E3779B97F4A7C15)))) & MASK == 0xE220A8397B1DCDAF
    )  # its first output


def test_folding_numbers_and_tensors_is_the_same() -> None:
    key = random.seed_key(3)
    numbers = torch.tensor([0, 1, 7, -1, 10**12])
    together = random.derive(key, numbers)
    assert together.tolist() == [int(random.derive(key, int(n))) for n in numbers]
    assert len(set(together.tolist())) == len(numbers)


@given(*[st.integers(-(2**63), 2**63 - 1)] * 3)
def test_integers_are_hashed_like_tensors(key: int, one: int, other: int) -> None:
    expected = int(random.derive(torch.tensor(key), torch.tensor(one), torch.tensor(other)))
    assert random.derive(key, one, other) == expected
    assert int(random.derive(key, torch.tensor([one]), other)) == expected


def test_shuffles_are_fair() -> None:
    """Each of 6 samples is first about as often: 3,000 draws, 500 ± 100 each (4.9 standard deviations)."""
    firsts = torch.stack([random.shuffle(random.derive(random.seed_key(0), r), 6)[0] for r in range(3000)])
    assert ((firsts.bincount(minlength=6) - 500).abs() < 100).all()


def test_padding_does_not_change_the_order_of_the_real() -> None:
    key = random.seed_key(9)
    real = torch.arange(20) < 13
    assert random.shuffle(key, 20, real)[:13].tolist() == random.shuffle(key, 13).tolist()


def test_participants() -> None:
    drawn = [random.participants(1, t, 50, 10) for t in range(200)]
    assert all(d.tolist() == sorted(set(d.tolist())) and len(d) == 10 for d in drawn)
    counts = torch.cat(drawn).bincount(minlength=50)  # 40 on average, standard deviation 5.7
    assert int(counts.min()) > 15
    assert int(counts.max()) < 65
    assert not torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[0], random.participants(1, 0, 50, 10))


def test_seeds_of_any_size() -> None:
    keys = {int(random.seed_key(s)) for s in (0, 1, -1, 2**63, 2**64 - 2, 10**30)}
    assert len(keys) == 6
