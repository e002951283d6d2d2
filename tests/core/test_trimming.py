"""Batches are cut to their longest sequence where that cannot change a result, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from coterie.core.data import FederatedData, Split, Transform
from coterie.core.model import Model, make_model
from coterie.core.packing import Input, pack
from coterie.core.steps import folding
from coterie.models import build
from tests import toy
from tests.fake_graphs import FakeGraphs

LONGEST, WORDS = 12, 10
TOKENS = Transform(padding=0)


def texts(count: int, seed: int) -> Tensor:
    """(count, LONGEST) tokens from 1 on, padded with 0; only the first text has the full length."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randint(1, WORDS, (count, LONGEST), generator=draw)
    lengths = torch.randint(1, 7, (count,), generator=draw)
    lengths[0] = LONGEST
    return torch.where(torch.arange(LONGEST) < lengths[:, None], x, 0)


def federation(sizes: tuple[int, ...] = (27, 5, 14)) -> FederatedData:
    def split(seed: int) -> Split:
        x = torch.cat([texts(size, seed + i) for i, size in enumerate(sizes)])
        return Split(x, x[:, 0] % 3, sizes)

    return FederatedData("texts", 3, split(0), split(100), transform=TOKENS)


class Attentive(nn.Module):
    """nn.MultiheadAttention that ignores padding; with dropout of attention weights, which have T x T entries."""

    def __init__(self, attention: float = 0.0, words: float = 0.0) -> None:
        super().__init__()
        self.embed, self.drop = nn.Embedding(WORDS, 8), nn.Dropout(words)
        self.mix = nn.MultiheadAttention(8, 2, dropout=attention, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        padded, z = x == 0, self.drop(self.embed(x))
        mixed = self.mix(z, z, z, key_padding_mask=padded, need_weights=False)[0]
        pooled: Tensor = self.head(mixed.masked_fill(padded[..., None], 0.0).sum(1))
        return pooled


class Averaged(nn.Module):
    """A mean over all positions, of which the padding is a part."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 4, padding_idx=0), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.head(self.embed(x).mean(1))
        return made


class Gated(Averaged):
    """The mean has no influence at the start."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        z = self.embed(x)
        made: Tensor = self.head(z[:, 0] + self.gate * z.mean(1))
        return made


class Normed(nn.Module):
    """BatchNorm over words: its running statistics count padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(WORDS, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm(self.embed(x).mT).mT
        made: Tensor = self.head(torch.where((x != 0)[..., None], z, 0.0).sum(1))
        return made


class Fixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(LONGEST, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.head(self.hidden(x.float()))
        return made


class Windows(nn.Module):
    """A convolution over few words and a maximum: the last window is seldom the largest, and a short text has none."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.windows, self.head = nn.Embedding(WORDS, 4, padding_idx=0), nn.Conv1d(4, 1, 3), nn.Linear(1, 3)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.head(self.windows(self.embed(x).mT).relu().amax(2))
        return made


def lstm() -> nn.Module:
    return build("lstm", (LONGEST,), 3, 0, vocabulary=WORDS, padding=0, hidden=8)


def transformer() -> nn.Module:
    return build("transformer", (LONGEST,), 3, 0, vocabulary=WORDS, padding=0, depth=1)


def model(network: nn.Module, transform: Transform = TOKENS) -> Model:
    return make_model(network, (LONGEST,), 3, transform, sample_type=torch.int64).to("cpu", torch.float64)


@pytest.mark.parametrize(
    ("make", "evaluation", "training"),
    [
        (lstm, True, True),
        (transformer, True, True),
        (Attentive, True, True),
        (lambda: Attentive(words=0.3), True, True),  # entries of a word are drawn by its place
        (lambda: Attentive(attention=0.3), True, False),
        (Normed, True, False),
        (Averaged, False, False),
        (Gated, False, False),
        (Fixed, False, False),
    ],
)
def test_when_batches_are_cut(make: Callable[[], nn.Module], evaluation: bool, training: bool) -> None:
    found = model(make()).trimming
    assert (found.evaluation, found.training) == (evaluation, training)


def test_data_without_padding_are_never_cut() -> None:
    found = model(lstm(), Transform()).trimming
    assert (found.evaluation, found.training) == (False, False)


def test_a_network_is_given_the_longest_text_of_a_batch() -> None:
    made, seen = model(lstm()), []
    made.encoder[0].register_forward_hook(lambda layer, given, z: seen.append(given[0].shape[1]))  # type: ignore[operator, union-attr]
    x = torch.zeros(3, LONGEST, dtype=torch.int64)
    x[0, :2], x[1, :5] = 3, 4
    short = made(made.start, x)
    whole = replace(made, trimming=type(made.trimming)())(made.start, x)
    assert seen == [5, LONGEST]
    assert torch.allclose(short, whole, atol=1e-12)
    made(made.start, x[2:])  # an empty text keeps one position
    with folding(FakeGraphs()):
        made(made.start, x)
    assert seen[2:] == [1, LONGEST]


@pytest.mark.parametrize("network", [lstm, transformer, Attentive, lambda: Attentive(0.3, 0.3), Averaged])
@pytest.mark.parametrize("name", ["fedper", "ditto"])
def test_all_back_ends_are_equal(name: str, network: Callable[[], nn.Module]) -> None:
    data, made = federation(), model(network())
    backends = [toy.looped] if network is lstm else [toy.looped, toy.stacked, toy.streams]  # LSTMs are looped on a CPU
    ways = [run(toy.method(name), made, data) for run in backends]
    whole = toy.looped(toy.method(name), replace(made, trimming=type(made.trimming)()), data)
    for other, _ in (*ways[1:], whole):
        assert toy.distance(ways[0][0], other) < 1e-10


def test_several_inputs_of_one_length_are_cut_alike() -> None:
    inputs = (
        Input("ids", (LONGEST,), "int64", padding=0),
        Input("mask", (LONGEST,), "int64", padding=0),
        Input("age", (), "float32"),
    )

    shapes: list[tuple[int, ...]] = []

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(WORDS, 4), nn.Linear(5, 3)

        def forward(self, ids: Tensor, mask: Tensor, age: Tensor) -> Tensor:
            shapes.append((ids.shape[1], mask.shape[1], age.ndim))
            z = (self.embed(ids) * mask[..., None]).sum(1)
            made: Tensor = self.head(torch.cat([z, age[:, None]], 1))
            return made

    transform = Transform(inputs=inputs)
    x = texts(4, 0)[1:]
    last = int((x != 0).nonzero()[:, 1].max()) + 1
    mask = (x != 0).long()
    x[0, last - 1], mask[0, last - 1] = 0, 1  # a real token with the id of the padding
    packed = pack(inputs, {"ids": x, "mask": mask, "age": torch.ones(3)})
    made = make_model(Masked(), tuple(packed.shape[1:]), 3, transform, sample_type=torch.uint8)
    assert made.trimming.training
    shapes.clear()
    short = made(made.start, packed)
    assert shapes == [(last, last, 1)]
    assert torch.allclose(short, replace(made, trimming=type(made.trimming)())(made.start, packed), atol=1e-6)


def test_a_window_that_a_short_text_does_not_fill_is_never_cut() -> None:
    for seed in range(30):
        torch.manual_seed(seed)
        network, words = Windows(), Transform(padding=0)
        found = make_model(network, (LONGEST,), 3, transform=words, sample_type=torch.int64).trimming
        assert not found.evaluation
        assert not found.training
