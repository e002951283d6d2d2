"""Padding of sequences per batch: a batch is cut to its longest sequence where that cannot change a result.

The data of a federation are padded to one length. A network that ignores the padding at the end gives the same outputs
for a shorter batch, at less cost; whether it does is verified when the model is made. Clients that are stacked or
recorded as a CUDA graph keep the full length: their shapes are fixed before the samples are known.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from coterie.core import dropout, random, steps
from coterie.core.data import Transform
from coterie.core.errors import CoterieError
from coterie.core.packing import Input, Inputs, unpack
from coterie.core.tree import Live, Tree, is_statistic

SPREAD = 0.1  # of the noise on weights in the trial, so that no weight hides padding by being zero at the start


class Trimming(NamedTuple):
    """Which inputs are cut, and when: in the modes in which outputs are the same with and without padding."""

    padded: tuple[Input, ...] = ()  # inputs that are filled up at the end of their first axis
    inputs: tuple[Input, ...] = ()  # all of them, which are packed; empty: one input
    evaluation: bool = False
    training: bool = False  # False if dropout draws by the length of the batch, for example

    def __call__(self, x: Inputs, training: bool) -> Any:
        """Raw samples (B, T, ...) -> (B, L, ...), or by name, where L is the longest sequence of the batch."""
        return self.cut(x) if (self.training if training else self.evaluation) and is_known(x) else x

    def cut(self, x: Inputs) -> Inputs:
        """Inputs of one length are cut alike."""
        named = x if isinstance(x, dict) else unpack(self.inputs, x) if self.inputs else {"": x}
        longest: dict[int, int] = {}
        for one in self.padded:
            length = real_length(named[one.name], one.padding)
            longest[one.shape[0]] = max(longest.get(one.shape[0], 1), length)
        shorter = {one.name: named[one.name][:, : longest[one.shape[0]]] for one in self.padded}
        return {**named, **shorter} if self.inputs else shorter[""]


NEVER = Trimming()


def real_length(x: Tensor, padding: float | None) -> int:
    """Positions of (B, T, ...) up to the last one that is not padding in every sample."""
    at = x.ne(math.nan if padding is None else padding).nonzero()
    return int(at[:, 1].max()) + 1 if len(at) else 0


def is_known(x: Inputs) -> bool:
    """Whether the values can be read here: not under vmap, in a recording or an export, and not on a GPU, which would
    have to wait."""
    if steps.is_recorded() or torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return False
    tensors = x.values() if isinstance(x, dict) else (x,)
    return all(type(t) is Tensor and t.device.type == "cpu" and not is_functorch_wrapped_tensor(t) for t in tensors)


def verified(
    features: Callable[[Tree, Any], Tensor],
    weights: Tree,
    transform: Transform,
    shape: tuple[int, ...],
    sample_type: torch.dtype,
) -> Trimming:
    """The modes in which features(weights, x) of random samples are the same with and without padding at their end.

    Short ones too: a convolution needs some length, and a maximum over many positions rarely comes from the last ones.
    """
    padded = tuple(one for one in transform.inputs if one.padding is not None and one.shape)
    if transform.padding is not None and shape:
        padded = (Input("", shape, str(sample_type).removeprefix("torch."), padding=transform.padding),)
    if not padded or any(one.shape[0] < 2 for one in padded):
        return NEVER
    trimming = Trimming(padded, transform.inputs)
    shortest = min(one.shape[0] for one in padded)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        disturbed = {name: noisy(name, t) for name, t in weights.items()}
        modes = [True, True]
        for length in sorted({1, 2, 3, shortest // 2} & set(range(1, shortest))):
            named = {one.name: sample(one, length if one in padded else None) for one in transform.inputs or padded}
            whole = named if transform.inputs else named[""]
            for i, kind in enumerate((dict, Live)):
                modes[i] = modes[i] and alike(features, kind(disturbed), whole, trimming.cut(whole))
    return trimming._replace(evaluation=modes[0], training=modes[1])


def sample(one: Input, length: int | None) -> Tensor:
    """(2, ...) random values of an input; integers are 0 and 1. length: where padding begins, or one before."""
    if one.type.is_floating_point:
        x = torch.randn(2, *one.shape).to(one.type)
    else:
        low, high = {0: (1, 2), 1: (0, 1)}.get(int(one.padding) if one.padding is not None else -1, (0, 2))
        x = torch.randint(low, high, (2, *one.shape)).to(one.type)
    if length is not None and one.padding is not None:
        x[0, length:] = one.padding
        x[1, max(length - 1, 1) :] = one.padding
    return x


def noisy(name: str, t: Tensor) -> Tensor:
    return t + SPREAD * torch.randn_like(t) if t.is_floating_point() and not is_statistic(name) else t.clone()


def alike(features: Callable[[Tree, Any], Tensor], weights: Tree, whole: Inputs, cut: Inputs) -> bool:
    """Also the statistics that BatchNorm updates in `weights`."""
    made, statistics = [], []
    state = torch.default_generator.get_state()
    for x in (whole, cut):
        own = type(weights)({name: t.clone() for name, t in weights.items()})
        torch.default_generator.set_state(state)
        try:
            with torch.no_grad(), dropout.known(random.seed_key(0), torch.arange(2)):
                made.append(features(own, x))
        except (RuntimeError, IndexError, ValueError, TypeError, KeyError, AssertionError, CoterieError):
            return False  # it needs the full length
        statistics.append([t for name, t in own.items() if is_statistic(name)])
    pairs = zip(statistics[0] + made[:1], statistics[1] + made[1:], strict=True)
    return all(a.shape == b.shape and torch.allclose(a.float(), b.float(), rtol=1e-4, atol=1e-5) for a, b in pairs)
