"""Networks for series of numbers and sequences of tokens: a convolution over time, and an LSTM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from coterie.core.batch import TEST_BATCH
from coterie.core.data import FederatedData
from coterie.core.errors import CoterieError
from coterie.core.model import Model
from coterie.core.padding import real_steps
from coterie.core.sharing import own_name
from coterie.models.network import Network, Shape, group_norm

CHANNELS = (32, 64, 128)  # of the blocks of cnn1d


def cnn1d(shape: Shape, classes: int) -> Network:
    """Three convolutions over time with GroupNorm, averaged over time; d = 128."""
    if len(shape) != 2 or min(shape) < 1:
        raise CoterieError(f"model 'cnn1d' takes series (channels, time), got samples of shape {shape}")
    channels, steps = shape
    layers: list[nn.Module] = []
    for after in CHANNELS:
        if layers and steps > 1:
            layers.append(nn.MaxPool1d(2))
            steps //= 2
        layers += [nn.Conv1d(channels, after, 5, padding=2), group_norm(after), nn.ReLU()]
        channels = after
    layers += [nn.AdaptiveAvgPool1d(1), nn.Flatten()]
    return Network(nn.Sequential(*layers), nn.Linear(channels, classes))


class TokenEmbedding(nn.Embedding):
    def forward(self, x: Tensor) -> Tensor:
        try:
            return super().forward(x)
        except IndexError:
            size = self.num_embeddings
            raise CoterieError(f"tokens must be from 0 to {size - 1} (vocabulary={size})") from None


class Masked(nn.Module):
    """A layer (B, T, F) -> (B, ...) that takes real (B, T), the positions that are not padding; None: all."""


class Padded(nn.Sequential):
    """Layers over tokens (B, T) or series (B, T, F) that end in padding. The first position is always real."""

    def __init__(self, padding: float, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.padding = padding

    def forward(self, x: Tensor) -> Tensor:
        first = torch.arange(x.shape[1], device=x.device) == 0
        real = (x != self.padding) | first if x.ndim == 2 else real_steps(x, self.padding)
        for layer in self:
            x = layer(x, real) if isinstance(layer, Masked) else layer(x)
        return x


class Hidden(Masked):
    """(B, T, F) -> (B, hidden): the hidden state of an LSTM after the last real step; per_token: (B, T, hidden)."""

    def __init__(self, features: int, hidden: int, layers: int = 1, per_token: bool = False) -> None:
        super().__init__()
        self.per_token = per_token
        self.lstm = nn.LSTM(features, hidden, layers, batch_first=True)

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        outputs: Tensor = self.lstm(x)[0]
        if self.per_token:
            return outputs
        if real is None:
            return outputs[:, -1]
        steps = torch.arange(real.shape[1], device=real.device)
        last = steps == (steps * real).amax(1, keepdim=True)  # (B, T), one per row
        return torch.where(last[..., None], outputs, 0.0).sum(1)


def lstm(
    shape: Shape,
    classes: int,
    vocabulary: int | None = None,
    hidden: int = 128,
    layers: int = 1,
    per_token: bool = False,
    padding: float | None = None,
) -> Network:
    """LSTM layers over tokens (T,) or series (T, F), the last hidden state; d = hidden.

    vocabulary: number of different tokens, for tokens only. per_token: an output for every position. padding: token, or
    number in all features, at the end of sequences that are shorter than others; the state is that before it.
    """
    check_sequence("lstm", shape, vocabulary, padding)
    for name, value in (("hidden", hidden), ("layers", layers)):
        if value < 1:
            raise CoterieError(f"{name} of model 'lstm' must be at least 1, got {value}")
    if vocabulary is None:
        recurrent = Hidden(shape[1], hidden, layers, per_token)
        return Network(recurrent if padding is None else chain(padding, recurrent), nn.Linear(hidden, classes))
    encoder = chain(padding, TokenEmbedding(vocabulary, hidden), Hidden(hidden, hidden, layers, per_token))
    return Network(encoder, nn.Linear(hidden, classes))


def chain(padding: float | None, *layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers) if padding is None else Padded(padding, *layers)


def check_sequence(name: str, shape: Shape, vocabulary: int | None, padding: float | None) -> None:
    """Raise an error unless samples are tokens (T,) with a vocabulary, or series (T, F) without one."""
    takes_tokens = vocabulary is not None or len(shape) < 2
    if padding is not None and takes_tokens and (vocabulary is None or padding not in range(vocabulary)):
        ids = "needs vocabulary=N" if vocabulary is None else f"must be a token from 0 to {vocabulary - 1}"
        raise CoterieError(f"padding of model '{name}' {ids}, got padding={padding!r}")
    if vocabulary is not None and (not isinstance(vocabulary, int) or vocabulary < 2):
        raise CoterieError(f"vocabulary of model '{name}' must be an integer of at least 2, got {vocabulary!r}")
    if len(shape) == (2 if vocabulary is None else 1) and min(shape) >= 1:
        return
    if vocabulary is None:
        takes = "series (time, features), or tokens (time,) with --model-args vocabulary=N"
    else:
        takes = "tokens (time,) if vocabulary is set"
    raise CoterieError(f"model '{name}' takes {takes}, got samples of shape {shape}")


def check_embeddings(model: Model, data: FederatedData) -> None:
    """Raise an error if samples have numbers beyond the rows of an nn.Embedding of this network.

    The network is tried on the smallest and the largest number at each position.
    """

    def check(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(layer: nn.Module, given: tuple[Any, ...]) -> None:
            assert isinstance(layer, nn.Embedding)
            if not given or not given[0].numel():
                return
            low, high = (int(end) for end in given[0].aminmax())
            if low < 0 or high >= layer.num_embeddings:
                raise CoterieError(
                    f"the embedding '{name}' of this network has {layer.num_embeddings} rows, for numbers from 0 to "
                    f"{layer.num_embeddings - 1}, but these samples give it numbers from {low} to {high}; make it "
                    f"nn.Embedding({high + 1}, ...)" + (", and use numbers from 0 on" if low < 0 else "")
                )

        return hook

    parts = (("encoder", model.encoder), ("head", model.head))
    found = [(own_name(f"{part}.{n}", model), m) for part, module in parts for n, m in module.named_modules()]
    hooks = [m.register_forward_pre_hook(check(name)) for name, m in found if isinstance(m, nn.Embedding)]
    try:
        for split in (data.train, data.test, data.validation) if hooks else ():
            if split is not None and len(split.x):
                flat = split.x.flatten(1)
                rows = torch.tensor(sorted({*flat.argmin(0).tolist(), *flat.argmax(0).tolist()}))
                with torch.no_grad():
                    for at in range(0, len(rows), TEST_BATCH):
                        model(model.start, split.x[rows[at : at + TEST_BATCH]])
    finally:
        for hook in hooks:
            hook.remove()


def check_tokens(data: FederatedData, vocabulary: int) -> None:
    """Raise an error if a sample has a token outside the vocabulary."""
    splits = (data.train, data.test, data.validation)
    ends = [end for split in splits if split is not None and len(split.x) for end in split.x.aminmax()]
    low, high = int(min(ends)), int(max(ends))
    if low < 0 or high >= vocabulary:
        raise CoterieError(
            f"vocabulary={vocabulary} allows tokens from 0 to {vocabulary - 1}, "
            f"but the data has tokens from {low} to {high}"
        )
