"""Optimizers as pure functions: `init` makes a state, `step` takes weights, gradients and state to the next ones.

Each equals its namesake in torch.optim. A state is a dictionary of tensors, so it can be stacked, sent and stored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

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

    decoupled: ClassVar[bool] = False  # whether weight decay is on the weights, not in the gradient

    lr: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def init(self, weights: Tree) -> Tree:
        kinds = {t.dtype for t in weights.values()}
        exact = torch.float64 if torch.float64 in kinds else torch.float32  # bfloat16 counts to 256
        count = {STEPS: next(iter(weights.values())).new_zeros((), dtype=exact)} if weights else {}
        return count | moments(FIRST, zeros(weights)) | moments(SECOND, zeros(weights))

    def step(
        self, weights: Tree, gradients: Tree, state: Tree, rate: Tensor, active: Tensor | None = None
    ) -> tuple[Tree, Tree]:
        if not weights:
            return weights, state
        before = state or self.init(weights)
        count, lr = before[STEPS] + 1, self.lr * rate
        inside, outside = (0.0, self.weight_decay) if self.decoupled else (self.weight_decay, 0.0)
        scales = torch.stack([lr / (1 - self.beta1**count), (1 - self.beta2**count).sqrt(), 1 - lr * outside])
        slopes = [gradients[n] for n in weights]
        last = [before[FIRST + n] for n in weights], [before[SECOND + n] for n in weights]
        settings = (inside, self.beta1, self.beta2, self.eps)
        made = ops.current().adam_step(list(weights.values()), slopes, *last, scales, active, *settings)
        moved, first, second = (dict(zip(weights, part, strict=True)) for part in made)
        if active is not None:
            count = torch.where(active, count, before[STEPS])
        return moved, {STEPS: count} | moments(FIRST, first) | moments(SECOND, second)


@dataclass(frozen=True)
class AdamW(Adam):
    """Loshchilov and Hutter, ICLR 2019: Adam with weight decay on the weights, not in the gradient."""

    decoupled: ClassVar[bool] = True
    weight_decay: float = 0.01


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
    """Apply a step where it is active, and leave everything unchanged elsewhere."""
    return after if active is None else tree.where(active, after, before)


OPTIMIZERS: dict[str, type[Optimizer]] = {"sgd": Sgd, "adam": Adam, "adamw": AdamW, "adagrad": Adagrad}
