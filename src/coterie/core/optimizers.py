"""Optimizers as pure functions: `init` makes a state, `step` takes weights, gradients and state to the next ones.

Each equals its namesake in torch.optim. A state is a dictionary of tensors, so it can be stacked, sent and stored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.core import ops, tree
from coterie.core.tree import Tree

STEPS, FIRST, SECOND = "steps", "first.", "second."  # keys of a state: number of steps, prefixes of moments


@dataclass(frozen=True)
class Optimizer(ABC):
    """An optimizer with its settings."""

    lr: float = 0.01
    weight_decay: float = 0.0

    @abstractmethod
    def init(self, weights: Tree) -> Tree:
        """The first state; empty if the optimizer has none."""

    @abstractmethod
    def step(
        self, weights: Tree, gradients: Tree, state: Tree, rate: Tensor, active: Tensor | None = None
    ) -> tuple[Tree, Tree]:
        """Weights and state after a step.

        state: empty for the first one. rate: () factor on lr. active: () False where nothing changes; None: it does.
        """


@dataclass(frozen=True)
class Sgd(Optimizer):
    """Stochastic gradient descent with momentum; weight decay is added to the gradient."""

    momentum: float = 0.0
    nesterov: bool = False

    def init(self, weights: Tree) -> Tree:
        return zeros(weights) if self.momentum else {}

    def step(
        self, weights: Tree, gradients: Tree, state: Tree, rate: Tensor, active: Tensor | None = None
    ) -> tuple[Tree, Tree]:
        if self.nesterov and self.momentum:
            return self._nesterov(weights, gradients, state, rate, active)
        slopes, speeds = ([part[n] for n in weights] if part else [] for part in (gradients, state))
        scale = (self.lr, self.weight_decay, self.momentum)
        moved, speed = ops.current().sgd_step(list(weights.values()), slopes, speeds, rate, active, *scale)
        return dict(zip(weights, moved, strict=True)), dict(zip(weights, speed, strict=True)) if self.momentum else {}

    def _nesterov(
        self, weights: Tree, gradients: Tree, state: Tree, rate: Tensor, active: Tensor | None
    ) -> tuple[Tree, Tree]:
        before, slope = state or zeros(weights), decayed(gradients, weights, self.weight_decay)
        speed = {n: g.add(before[n], alpha=self.momentum) for n, g in slope.items()}
        moved = {n: w - self.lr * rate * (slope[n] + self.momentum * speed[n]) for n, w in weights.items()}
        return settled(active, (moved, speed), (weights, before))


@dataclass(frozen=True)
class Adam(Optimizer):
    """Kingma and Ba, ICLR 2015, with bias correction; weight decay is added to the gradient."""

    lr: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def init(self, weights: Tree) -> Tree:
        count = {STEPS: next(iter(weights.values())).new_zeros(())} if weights else {}
        return count | moments(FIRST, zeros(weights)) | moments(SECOND, zeros(weights))

    def step(
        self, weights: Tree, gradients: Tree, state: Tree, rate: Tensor, active: Tensor | None = None
    ) -> tuple[Tree, Tree]:
        if not weights:
            return weights, state
        before = state or self.init(weights)
        slope, shrunk = self._decay(gradients, weights, rate)
        count = before[STEPS] + 1
        first = {n: before[FIRST + n].lerp(g, 1 - self.beta1) for n, g in slope.items()}
        second = {n: before[SECOND + n] * self.beta2 + (1 - self.beta2) * g.square() for n, g in slope.items()}
        lr = self.lr * rate / (1 - self.beta1**count)
        spread = (1 - self.beta2**count).sqrt()
        moved = {n: w - lr * first[n] / (second[n].sqrt() / spread + self.eps) for n, w in shrunk.items()}
        after = {STEPS: count} | moments(FIRST, first) | moments(SECOND, second)
        return settled(active, (moved, after), (weights, before))

    def _decay(self, gradients: Tree, weights: Tree, rate: Tensor) -> tuple[Tree, Tree]:
        """Gradients and weights after weight decay."""
        return decayed(gradients, weights, self.weight_decay), weights


@dataclass(frozen=True)
class AdamW(Adam):
    """Loshchilov and Hutter, ICLR 2019: Adam with weight decay on the weights, not in the gradient."""

    weight_decay: float = 0.01

    def _decay(self, gradients: Tree, weights: Tree, rate: Tensor) -> tuple[Tree, Tree]:
        return gradients, {n: w * (1 - self.lr * rate * self.weight_decay) for n, w in weights.items()}


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Duchi, Hazan and Singer, JMLR 2011; weight decay is added to the gradient."""

    eps: float = 1e-10

    def init(self, weights: Tree) -> Tree:
        return zeros(weights)

    def step(
        self, weights: Tree, gradients: Tree, state: Tree, rate: Tensor, active: Tensor | None = None
    ) -> tuple[Tree, Tree]:
        before, slope = state or zeros(weights), decayed(gradients, weights, self.weight_decay)
        total = {n: before[n] + g.square() for n, g in slope.items()}
        moved = {n: w - self.lr * rate * slope[n] / (total[n].sqrt() + self.eps) for n, w in weights.items()}
        return settled(active, (moved, total), (weights, before))


def zeros(weights: Tree) -> Tree:
    return {n: torch.zeros_like(t) for n, t in weights.items()}


def moments(prefix: str, of: Tree) -> Tree:
    return {prefix + n: t for n, t in of.items()}


def decayed(gradients: Tree, weights: Tree, decay: float) -> Tree:
    """Gradients with weight decay added."""
    return {n: g.add(weights[n], alpha=decay) for n, g in gradients.items()} if decay else gradients


def settled(active: Tensor | None, after: tuple[Tree, Tree], before: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
    """What a step changes: everything, or nothing where it is not active."""
    return after if active is None else tree.where(active, after, before)


OPTIMIZERS: dict[str, type[Optimizer]] = {"sgd": Sgd, "adam": Adam, "adamw": AdamW, "adagrad": Adagrad}
