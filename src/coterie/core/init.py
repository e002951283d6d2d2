"""Initial weights in addition to `model.start`: more networks of the same kind, and layers that a method adds.

They are drawn on the CPU, so they are equal on every device, and depend on `model.start` and a number only: a run with
another seed has another start, hence other weights.
"""

from __future__ import annotations

import copy

import torch
from torch import Generator, Tensor, nn

from coterie.core import random, tree
from coterie.core.errors import CoterieError
from coterie.core.model import Model, Weights
from coterie.core.tree import Tree


def networks(model: Model, count: int) -> Weights:
    """(count, ...) independently drawn networks; the first is the model's start."""
    return tree.stack([model.start, *(redrawn(model, number) for number in range(1, count))])


def redrawn(model: Model, number: int) -> Weights:
    """New initial weights from each module's reset_parameters. BatchNorm keeps its initial values."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(_seed(model, number))
        drawn = Weights(_draw(model.encoder), _draw(model.head))
    if not any(drawn):
        raise CoterieError("this network cannot be reinitialized: none of its modules has reset_parameters")
    parts = [{n: d.get(n, t).to(t) for n, t in start.items()} for d, start in zip(drawn, model.start, strict=True)]
    return Weights(*parts)


def _draw(module: nn.Module) -> Tree:
    found = {}
    for name, part in copy.deepcopy(module).to("cpu", torch.float32).named_modules():
        if hasattr(part, "reset_parameters") and not isinstance(part, nn.modules.batchnorm._NormBase):
            part.reset_parameters()
            owned = part.named_parameters(name, recurse=False)
            found.update({n: p.detach() for n, p in owned})
    return found


def generator(model: Model, number: int = 0) -> Generator:
    """A generator for layers that a method adds."""
    return Generator().manual_seed(_seed(model, number))


def linear(draw: Generator, inputs: int, shape: tuple[int, ...], like: Tensor) -> tuple[Tensor, Tensor]:
    """Weight (*shape, inputs) and bias (*shape), with the distribution of torch's nn.Linear."""
    bound = inputs**-0.5
    weight = torch.empty(*shape, inputs).uniform_(-bound, bound, generator=draw)
    bias = torch.empty(shape).uniform_(-bound, bound, generator=draw)
    return weight.to(like), bias.to(like)


def normal(draw: Generator, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Standard normal, as in torch's nn.Embedding."""
    return torch.randn(shape, generator=draw).to(like)


def uniform(draw: Generator, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Uniform on [0, 1)."""
    return torch.rand(shape, generator=draw).to(like)


def _seed(model: Model, number: int) -> int:
    """A hash of the number and of all weights that the model starts from."""
    key = random.seed_key(number)
    for t in tree.leaves(model.start):
        key = random.derive(
            key, random.bits(key, t.cpu().float().contiguous().view(torch.int32).flatten().long()).sum()
        )
    return int(key & ((1 << 63) - 1))
