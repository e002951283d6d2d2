"""Sample-level differential privacy (DP-SGD): per-sample gradients are clipped, and every step adds noise.

Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar, Zhang: Deep Learning with Differential Privacy, CCS 2016.

Batches are Poisson-sampled: each sample is drawn independently with q = B/n (all samples if n <= B), so their size
varies; an epoch has as many steps as without privacy. A step follows (Σ clip(g_j) + N(0, (zC)²)) / (q n). Neighbors are
two datasets of a client in which one sample is present, or its slot is empty: n and the drawn slots are the same, and
the sum differs by at most C, with probability q. So every batch is one sampled Gaussian mechanism of multiplier z, or
z/√k if it is used for k steps. Batches are truncated to `most_drawn`; the probability of that is part of δ.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from coterie.core import random
from coterie.core.batch import Batch, Data, Epoch
from coterie.core.data import Transform
from coterie.core.errors import CoterieError
from coterie.core.gradients import functional_gradient
from coterie.core.method import Census, Method
from coterie.core.model import Model
from coterie.core.training import LocalTraining, objective
from coterie.core.tree import Tree
from coterie.core.wrapper import Around
from coterie.privacy.accountant import most_drawn
from coterie.privacy.noise import Noise, SecretNoise

P = TypeVar("P")
TOGETHER = 64  # samples whose gradients are in memory at a time
CUT = 1e-12  # probability that a batch is truncated


@dataclass
class Cursor:
    """A client's position in a round, the key of reproducible noise: it never repeats and ignores padding."""

    trainings: int = 0  # begun so far
    uses: int = 0  # of the current batch

    def begin(self) -> int:
        self.trainings += 1
        return self.trainings

    def go(self) -> None:
        self.uses = 0

    def use(self) -> int:
        self.uses += 1
        return self.uses


@dataclass(frozen=True)
class PrivateSgd(LocalTraining):
    """DP-SGD of one client in one round. Copies made by `but` share the cursor."""

    noise: float = field(kw_only=True)  # z
    bound: float = field(kw_only=True)  # C
    key: Tensor = field(kw_only=True)  # () randomness of this client in this round
    source: Noise = field(kw_only=True)
    cursor: Cursor = field(default_factory=Cursor, kw_only=True, compare=False)

    def runs(self, data: Data) -> Iterator[Epoch]:
        """Epochs of a single batch, each drawn independently."""
        places = torch.arange(len(data.y), device=data.y.device)
        most = min(len(places), most_drawn(self.batch_size, CUT))
        size = data.samples.double()
        chance = (self.batch_size / size).clamp_max(1)
        steps = (size / self.batch_size).floor() if self.drop_last else (size / self.batch_size).ceil()
        longest = len(places) // self.batch_size if self.drop_last else -(-len(places) // self.batch_size)
        training = self.cursor.begin()
        for epoch, step in itertools.product(range(self.local_epochs), range(longest)):
            self.cursor.go()
            draws, noise = (
                random.derive(self.key, what, training, epoch, step) for what in (random.DRAW, random.NOISE)
            )
            draws = self.source.bits(draws, places)
            if data.real is not None:
                draws = torch.where(data.real, draws, torch.iinfo(torch.int64).max)
            first = draws.argsort()[:most]  # those drawn have the smallest numbers
            expected = torch.where(step < steps, chance * size, 0.0)
            drawn = draws[first] < chance * 2.0**63
            if data.alone and isinstance(self.source, SecretNoise):  # exact sums: drop samples not drawn
                first, drawn = (t[: max(int(drawn.sum()), 1)] for t in (first, drawn))
            batch = data.batch(first, epoch)
            batch = batch._replace(
                real=drawn, expected=expected, key=random.derive(data.key, random.DROPOUT, epoch, step), noise_key=noise
            )
            if self.rates.local.varies:
                batch = batch._replace(pace=self.pace(torch.full_like(first, step), epoch, data))
            yield Epoch(batch, len(first), 1, 0)

    def gradient(
        self, params: P, loss: Callable[[P, Batch], Tensor], batch: Batch, weights: Tree, statistics: Tree
    ) -> tuple[Tree, Tree]:
        if not weights:
            return {}, statistics
        assert batch.real is not None
        assert batch.expected is not None
        assert batch.noise_key is not None

        def clipped(x: Tensor, y: Tensor, sample: Tensor, real: Tensor) -> Tree:
            single = Batch(x[None], y[None], sample[None], key=batch.key)
            slope, _ = functional_gradient(objective(params, loss, single), weights, {})
            norm = torch.stack([g.square().sum() for g in slope.values()]).sum().sqrt()
            factor = (self.bound / norm.clamp_min(1e-30)).clamp_max(1)
            fine = real & norm.isfinite()
            return {name: torch.where(fine, g * factor, 0.0) for name, g in slope.items()}

        parts = [
            torch.func.vmap(clipped)(batch.x[part], batch.y[part], batch.sample[part], batch.real[part])
            for start in range(0, len(batch.y), TOGETHER)
            for part in [slice(start, start + TOGETHER)]
        ]
        key = random.derive(batch.noise_key, self.cursor.use())
        rows = [{name: part[name] for name in weights} for part in parts]
        total = self.source.sums(key, rows, self.bound, self.noise)
        expected = batch.expected.clamp_min(1)
        return {name: total[name] / expected.to(w.dtype) for name, w in weights.items()}, statistics


@dataclass(frozen=True)
class SampleNoise(Around):
    """Clients train with PrivateSgd."""

    noise: float = field(kw_only=True)
    bound: float = field(kw_only=True)
    source: Noise = field(kw_only=True)

    def server_init(self, model: Model, census: Census) -> Any:
        check_network(model)
        return self.inner.server_init(model, census)

    def client_train(self, model: Model, state: Any, down: Any, data: Data) -> tuple[Any, Any]:
        return self.private(data.key).client_train(model, state, down, data)

    def client_finish(self, model: Model, state: Any, down: Any, data: Data) -> Any:
        later = random.derive(data.key, random.NOISE)  # the key of a round can also be that of its last training
        return self.private(later).client_finish(model, state, down, data)

    def private(self, key: Tensor) -> Method[Any, Any, Any, Any]:
        own = {f.name: getattr(self.inner.train, f.name) for f in fields(LocalTraining)}
        private = PrivateSgd(**own, noise=self.noise, bound=self.bound, key=key, source=self.source)
        return replace(self.inner, train=private)


def check_network(model: Model) -> None:
    if model.batch_norm:
        raise CoterieError(
            "--dp sample does not support BatchNorm: a sample changes the gradients of its whole batch, so clipping "
            "does not bound its influence; use GroupNorm or no normalization"
        )
    if model.hidden_draws:
        raise CoterieError(
            f"--dp sample does not support random layers other than dropout: {model.hidden_draws}; remove them: DP "
            "noise already regularizes"
        )


@dataclass(frozen=True)
class Tally(LocalTraining):
    """Every gradient is zero; counts the gradients per batch of every epoch."""

    uses: list[int] = field(default_factory=list, kw_only=True)

    def runs(self, data: Data) -> Iterator[Epoch]:
        for _ in range(self.local_epochs):
            self.uses.append(0)
            yield Epoch(data.batch(torch.zeros(1, dtype=torch.int64, device=data.y.device), 0), 1, 1, 0)

    def gradient(
        self, params: P, loss: Callable[[P, Batch], Tensor], batch: Batch, weights: Tree, statistics: Tree
    ) -> tuple[Tree, Tree]:
        self.uses[-1] += 1
        return {name: torch.zeros_like(w) for name, w in weights.items()}, statistics


def uses(method: Any, model: Model, x: Tensor, train: bool) -> list[int]:
    """Gradients per batch, for every epoch of a client's training or of its final step.

    Counted by running the method on one arbitrary sample x (1, ...).
    """
    tally = Tally(**{f.name: getattr(method.train, f.name) for f in fields(LocalTraining)})
    counted, classes = replace(method, train=tally), model.classes
    census = Census(torch.ones(1, dtype=torch.int64), torch.ones(1, classes, dtype=torch.int64))
    rate = torch.ones((), dtype=model.mean.dtype)
    data = Data(x, torch.zeros(1, dtype=torch.int64), random.seed_key(0), rate, classes, Transform(), alone=True)
    with torch.no_grad():
        server = method.server_init(model, census)
        state = method.client_init(model, data, method.server_welcome(server))
        down = method.server_send(server, torch.tensor(0))
        (counted.client_train if train else counted.client_finish)(model, state, down, data)
    return tally.uses
