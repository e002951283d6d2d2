"""Noise for privacy: it follows its distribution, lies on a lattice, and cannot be predicted from what was sent."""

from __future__ import annotations

import math
import time
import typing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from coterie.core import random, tree
from coterie.core.batch import Data
from coterie.core.data import Transform
from coterie.core.errors import CoterieError
from coterie.deploy.device import Device
from coterie.deploy.store import Store
from coterie.privacy import Protection, noise
from coterie.privacy.noise import BITS, Noise, ReproducibleNoise, SecretNoise, lattice_step, on_lattice
from coterie.privacy.statistics_noise import StatisticsNoise
from tests import direct, toy

FAILS = 1e-6  # chance that a test of a distribution fails without reason
KEY = random.seed_key(0)
INVERSE1, INVERSE2 = pow(0xBF58476D1CE4E5B9, -1, 2**64), pow(0x94D049BB133111EB, -1, 2**64)
CLIP, Z = 5.0, 2.0


# The attack: statistics of absent classes are nothing but noise.


def unscramble(x: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """The inverse of random.scramble."""

    def unshift(x: Any, by: int) -> Any:
        found = x
        for _ in range(64 // by + 1):
            found = x ^ (found >> np.uint64(by))
        return found

    x = unshift(x, 31) * np.uint64(INVERSE2)
    x = unshift(x, 27) * np.uint64(INVERSE1)
    return unshift(x, 30)


def recover_key(drawn: Tensor, known: Tensor, slack: int = 64) -> int | None:
    """The key that `random.normal` made these numbers from, given those that are known; None if there is none.

    A pair of Box and Muller gives back its uniform number, that all but about 17 of the 64 bits of a hash, and the
    hash is a bijection: 2^17 · slack / 64 candidates are tried, each against all other known numbers.
    """
    pairs = (len(drawn) + 1) // 2
    both = [i for i in range(pairs) if i + pairs < len(drawn) and known[i] and known[i + pairs]]
    a, b = (float(drawn[at]) for at in (both[0], both[0] + pairs))
    top = math.exp(-(a * a + b * b) / 2) * 2**53 - 0.5
    middle = np.uint64(max(round(top), slack)) + np.arange(-slack, slack, dtype=np.int64).astype(np.uint64)
    low = np.arange(2**10, dtype=np.uint64)
    sign = np.array([0, 2**63], np.uint64)
    hashes = ((middle[:, None] << np.uint64(10)) | low)[:, :, None] | sign
    golden = np.uint64(0x9E3779B97F4A7C15)
    keys = unscramble(hashes.ravel()) - np.uint64(both[0]) * golden - golden
    at, wanted = both[1], float(drawn[both[1]])
    candidates = torch.from_numpy(keys.view(np.int64))
    first, second = (random.bits(candidates, torch.full_like(candidates, at + shift)) >> 10 for shift in (0, pairs))
    u, v = ((t.double() + 0.5) * 2.0**-53 for t in (first, second))
    guess = (-2 * u.log()).sqrt() * (2 * math.pi * v).cos()
    for at in torch.nonzero((guess - wanted).abs() < 1e-6)[:, 0]:
        again = random.normal(candidates[at], drawn)
        if torch.allclose(again[known], drawn[known], atol=1e-6):
            return int(candidates[at])
    return None


def one_class(source: Noise, key: int) -> tuple[Data, Any, Any]:
    """A client whose samples are all of class 1, and what it sends without noise and with it."""
    x, y = toy.toy(train=(30,), test=(1,)).train.client(0)
    own = Data(x, torch.ones_like(y), random.seed_key(key), torch.ones((), dtype=torch.float64), 4, Transform(),
               alone=True)  # fmt: skip
    model, inner = toy.model(), toy.method("fedpac", lr=0.0, head_lr=0.0)
    census = toy.Looped(inner, model, toy.toy(), 0, processes=1).census
    sent = []
    for method in (inner, StatisticsNoise(inner=inner, noise=Z, bound=CLIP, source=source)):
        down = method.server_send(method.server_init(model, census), torch.tensor(0))
        sent.append(method.client_train(model, method.client_init(model, own, {}), down, own)[1])
    return own, *sent


@pytest.mark.parametrize("source", [ReproducibleNoise(), SecretNoise()])
def test_noise_of_absent_classes_gives_away_reproducible_noise_and_nothing_of_secret_noise(source: Noise) -> None:
    """The same attack on both. Budget against secret noise: 20 messages of 2^18 candidates each."""
    secret = isinstance(source, SecretNoise)
    start = time.monotonic()
    for message in range(20 if secret else 1):
        own, exact, up = one_class(source, message)
        n, unit = len(own.y), Z * 2 * CLIP
        drawn = (up.moments * n / unit).flatten()  # of absent classes: noise in units of its deviation
        known = torch.arange(4).repeat_interleave(8) != 1
        key = recover_key(drawn, known)
        if secret:
            assert key is None
            continue
        assert key is not None
        noise = unit / n * random.normal(torch.tensor(key), exact.moments)
        torch.testing.assert_close(up.moments - noise, exact.moments, atol=1e-9, rtol=0)  # samples without noise
        assert float((up.moments - exact.moments).abs().max()) > 0.1
    assert time.monotonic() - start < 60


def test_a_device_is_never_built_with_noise_that_can_be_predicted(tmp_path: Any) -> None:
    model, data = toy.model(torch.float32), toy.toy()
    for protection, name in ((Protection(dp="sample"), "fedavg"), (Protection(dp_statistics=1.0), "fedpac")):
        simulated = protection.around(toy.method(name), model, 3, 7)
        with pytest.raises(CoterieError, match="ReproducibleNoise, which is predictable"):
            Device(direct.agreement(simulated, model, data), data, (0, 1, 2, 3, 4), Store(tmp_path))
        with pytest.raises(CoterieError, match="SecretNoise only"):
            protection.deployed(toy.method(name), model, 3, ReproducibleNoise())  # type: ignore[arg-type]
        private = protection.deployed(toy.method(name), model, 3)
        with pytest.raises(CoterieError, match="needs a privacy record"):
            Device(direct.agreement(private, model, data), data, (0, 1, 2, 3, 4), Store(tmp_path))
    assert typing.get_type_hints(Protection.deployed)["source"] is SecretNoise  # what mypy holds callers to
    assert not issubclass(ReproducibleNoise, SecretNoise)
    assert not issubclass(SecretNoise, ReproducibleNoise)


# Its distribution.


def chi_square(counts: np.ndarray[Any, Any], expected: Any) -> float:
    """The chance of counts that are as uneven as these."""
    statistic = float(((counts - expected) ** 2 / expected).sum())
    half = torch.tensor([(len(counts) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def check_distribution(drawn: np.ndarray[Any, np.dtype[np.int64]]) -> None:
    n, z = len(drawn), (drawn.astype(np.float64) + 0.5) * 2.0**-BITS  # rounded down: the middle of its cell
    quantile = 5.0  # of a normal distribution: both sides together below FAILS
    assert abs(z.mean()) < quantile / math.sqrt(n)
    assert abs((z**2).mean() - 1) < quantile * math.sqrt(2 / n)
    assert abs((z**4).mean() - 3) < quantile * math.sqrt(96 / n)
    assert abs(np.corrcoef(z[:-1], z[1:])[0, 1]) < quantile / math.sqrt(n)
    bins = 256
    edges = torch.special.ndtri(torch.arange(1, bins, dtype=torch.float64) / bins).numpy()
    assert chi_square(np.bincount(np.searchsorted(edges, z), minlength=bins), n / bins) > FAILS
    for shift in (0, 8, 24):  # the lattice itself: low bits are even, all of them used
        assert chi_square(np.bincount((drawn >> shift) & 255, minlength=256), n / 256) > FAILS


def test_secret_noise_is_a_gaussian_rounded_to_the_lattice() -> None:
    check_distribution(SecretNoise().gaussian(1_000_000))


def test_decisions_that_float64_cannot_make_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slow path, which is taken once in 2^32 draws, made common."""
    asked = []
    exact = noise.exactly_accepted
    monkeypatch.setattr(noise, "TIE", 0.1)
    monkeypatch.setattr(noise, "exactly_accepted", lambda *about: asked.append(about) or exact(*about))
    check_distribution(SecretNoise().gaussian(60_000))
    assert len(asked) > 1000
    cuts, wide = noise.cumulated()
    for k, (to_chunks, full) in enumerate(zip(cuts.tolist(), wide, strict=True)):
        assert full >> 192 == to_chunks
        assert noise.exact_k(to_chunks - 1) <= k < noise.exact_k(to_chunks + 1) or to_chunks >= 2**64 - 2


def test_the_chance_of_every_point_of_the_lattice(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a lattice so coarse that its points can be counted: P(n) = Φ((n + 1) / 4) - Φ(n / 4), all decisions exact."""
    monkeypatch.setattr(noise, "BITS", 2)
    monkeypatch.setattr(noise, "TIE", 1.0)
    drawn, edge = SecretNoise().gaussian(40_000), 10
    counts = np.bincount(np.clip(drawn, -edge - 1, edge) + edge + 1)
    cuts = torch.special.ndtr(torch.arange(-edge, edge + 1, dtype=torch.float64) / 4)
    chances = torch.cat([cuts[:1], cuts.diff(), 1 - cuts[-1:]]).numpy()
    assert chi_square(counts, len(drawn) * chances) > FAILS


def test_every_call_draws_anew() -> None:
    source, part = SecretNoise(), {"w": torch.zeros(1, 500, dtype=torch.float64)}
    first, second = (source.sums(KEY, [part], 1.0, 1.0)["w"] for _ in range(2))
    assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 5 / math.sqrt(500)
    assert not torch.equal(source.bits(KEY, torch.arange(9)), source.bits(KEY, torch.arange(9)))


def test_a_million_numbers_take_seconds() -> None:
    start = time.process_time()
    SecretNoise().gaussian(1_000_000)
    assert time.process_time() - start < 5


# Its lattice.


class Quiet(SecretNoise):
    """Only tests can have this: no noise at all, and draws that can be repeated."""

    def gaussian(self, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.zeros(count, np.int64)

    def bits(self, key: Tensor, places: Tensor) -> Tensor:
        return random.bits(key, places)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_contribution_is_longer_than_the_bound(dtype: torch.dtype) -> None:
    """Exactly, in integers: also rows that are as long as the bound, far longer, or not finite."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(40, 1000, generator=draw, dtype=torch.float64)
    rows = rows / rows.norm(dim=1, keepdim=True) * 0.3 * torch.logspace(-3, 30, 40, dtype=torch.float64)[:, None]
    rows[7], rows[8, 3], rows[9] = rows[7] / rows[7].norm() * 0.3, math.nan, math.inf
    parts = {"a": rows[:, :600].to(dtype), "b": rows[:, 600:].to(dtype).view(40, 20, 20)}
    step = lattice_step(2.0 * 0.3)
    whole = on_lattice(parts, 0.3, step)
    assert all(torch.equal(t, t.trunc()) for t in whole.values())
    for row in range(40):
        numbers = [n for t in whole.values() for n in t[row].flatten().tolist()]
        assert sum(n * n for n in numbers) <= (0.3 / step) ** 2
        assert (sum(n * n for n in numbers) == 0) == (row in (8, 9))


def test_sums_are_exact_whatever_their_order() -> None:
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(300, 50, generator=draw, dtype=torch.float32) * torch.logspace(-6, 3, 300)[:, None]
    mixed = rows[torch.randperm(300, generator=draw)]
    one, other, split = (
        Quiet().sums(KEY, parts, 1.0, 1.0)["w"]
        for parts in ([{"w": rows}], [{"w": mixed}], [{"w": rows[:7]}, {"w": rows[7:]}])
    )
    assert torch.equal(one, other)
    assert torch.equal(one, split)
    plain = (rows.double() * (1 / rows.double().norm(dim=1)).clamp_max(1)[:, None]).sum(0)
    torch.testing.assert_close(one.double(), plain, atol=1e-3, rtol=1e-5)


def test_what_is_sent_lies_on_one_lattice_whatever_the_samples_are() -> None:
    """Mironov's attack needs sums whose possible values depend on the samples; here they do not."""
    step = lattice_step(1.5 * 0.7)
    for scale in (0.0, 1e-9, 0.123456789, 0.7):
        rows = scale * torch.rand(5, 400, dtype=torch.float64)
        found = SecretNoise().sums(KEY, [{"w": rows}], 0.7, 1.5)["w"]
        assert torch.equal((found / step).round() * step, found)
        assert abs(float(found.std()) / 1.05 - 1) < 0.25


def test_noise_too_small_for_the_lattice_is_refused() -> None:
    with pytest.raises(CoterieError, match="too small for this many samples"):
        SecretNoise().sums(KEY, [{"w": torch.ones(5000, 2)}], 1.0, 1e-6)


# The mechanisms with it.


def trained(name: str, protection: Protection, source: SecretNoise) -> tuple[tree.Tree, Any]:
    model, data = toy.model(), toy.toy()
    return toy.looped(protection.deployed(toy.method(name), model, 5, source), model, data, rounds=1, join_ratio=1.0)


@pytest.mark.parametrize(
    ("name", "protection"),
    [
        ("fedavg", Protection(dp="sample", dp_noise=1e-4)),
        ("fedavg", Protection(dp="client", dp_noise=1e-4)),
        ("fedpac", Protection(dp_statistics=1e-4, dp_statistics_clip=1.0)),
        ("fedpac-proto", Protection(dp_statistics=1e-4, dp_statistics_clip=1.0)),
    ],
)
def test_without_noise_the_lattice_changes_nothing_that_matters(name: str, protection: Protection) -> None:
    """The same mechanisms in exact integers and in floating point, with next to no noise."""
    exact, _ = trained(name, protection, Quiet())
    model, data = toy.model(), toy.toy()
    plain, _ = toy.looped(protection.around(toy.method(name), model, 5, 7), model, data, rounds=1, join_ratio=1.0)
    kept = [n for n in plain if n != "server.key" and "head_weights" not in n and "heads" not in n]
    assert toy.distance({n: plain[n] for n in kept}, {n: exact[n] for n in kept}) < 0.01


def test_secret_noise_of_a_training_has_its_deviation() -> None:
    protection = Protection(dp="sample", dp_noise=3.0, dp_clip=0.5)
    model, data = toy.model(), toy.toy(train=(8, 8, 8, 8, 8))
    method = toy.method("fedavg", lr=0.1, momentum=0.0, weight_decay=0.0, local_epochs=1)
    ends = [
        toy.looped(protection.deployed(method, model, 5, source), model, data, rounds=1, join_ratio=1.0)[0]
        for source in (Quiet(), SecretNoise())
    ]
    gaps = torch.cat([(ends[0][n] - ends[1][n]).flatten() for n in ends[0] if n.startswith("server.weights")])
    expected = 0.1 * 3.0 * 0.5 / 8 / math.sqrt(5)  # lr z C / n, the mean of five clients
    assert float(gaps.std()) == pytest.approx(expected, rel=5 / math.sqrt(2 * len(gaps)))


def test_training_with_secret_noise_is_fast_enough_for_a_device() -> None:
    """50 steps of 100,000 weights, at most a few seconds for noise."""
    source, start = SecretNoise(), time.process_time()
    part = {"w": torch.zeros(8, 100_000)}
    for _ in range(10):
        source.sums(KEY, [part], 1.0, 1.0)
    assert 5 * (time.process_time() - start) < 15


def test_one_sample_changes_the_sums_of_statistics_by_no_more_than_said() -> None:
    """Sums of 30 samples and of the first 29, without noise: in units of the bounds they differ by at most √4."""
    own, _, _ = one_class(SecretNoise(), 0)
    model = toy.model()
    z = torch.stack([model.features(model.start.encoder, x[None])[0] for x in own.x])
    z = z * (CLIP / z.norm(dim=1, keepdim=True)).clamp_max(1)

    def sums(n: int) -> list[Tensor]:
        method = StatisticsNoise(inner=toy.method("fedpac"), noise=Z, bound=CLIP, source=Quiet())
        means = torch.zeros(4, 8, dtype=torch.float64)
        means[1] = z[:n].mean(0)
        exact = dict.fromkeys(("counts", "moments", "prototypes", "variance"), means)
        part = replace(own, x=own.x[:n], y=own.y[:n])
        found = method.secret_sums(exact, torch.cat([z[:n], z[:n]]), part, Quiet())
        assert found.moments is not None
        assert found.squares is not None
        return [found.counts, found.prototypes / CLIP, found.moments / CLIP, found.squares / CLIP**2]

    more, fewer = sums(30), sums(29)
    assert more[0].tolist() == pytest.approx([0, 30, 0, 0], rel=1e-5)
    torch.testing.assert_close(more[1][1], z.sum(0) / CLIP, rtol=1e-5, atol=0)
    torch.testing.assert_close(more[2], more[1])
    torch.testing.assert_close(more[3], z.square().sum() / CLIP**2, rtol=1e-5, atol=0)
    assert float(torch.cat([(a - b).flatten() for a, b in zip(more, fewer, strict=True)]).norm()) <= 2
