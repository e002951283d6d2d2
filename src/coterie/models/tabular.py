"""Networks for tables of numbers. Samples of other shapes are flattened."""

from __future__ import annotations

import math

from torch import nn

from coterie.core.errors import CoterieError
from coterie.models.network import Network, Shape


def linear(shape: Shape, classes: int) -> Network:
    """Logistic regression: the features are the inputs themselves."""
    return Network(nn.Flatten(), nn.Linear(_numbers("linear", shape), classes))


def mlp(shape: Shape, classes: int, hidden: int = 64) -> Network:
    """Two hidden layers; d = hidden."""
    if hidden < 1:
        raise CoterieError(f"model 'mlp' needs at least 1 hidden unit, got {hidden}")
    encoder = nn.Sequential(
        nn.Flatten(),
        nn.Linear(_numbers("mlp", shape), hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
    )
    return Network(encoder, nn.Linear(hidden, classes))


def _numbers(name: str, shape: Shape) -> int:
    if not shape or min(shape) < 1:
        raise CoterieError(f"model '{name}' takes samples of one or more numbers, not of shape {shape}")
    return math.prod(shape)
