"""What a model does with raw samples, against values computed by hand."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from coterie.core.data import Column, Transform
from coterie.core.model import make_model
from coterie.core.preprocess import Preprocess

NAN = float("nan")


def test_columns_are_filled_marked_and_one_hot() -> None:
    columns = (
        Column("age"),
        Column("chol", fill=200.0, indicator=True),
        Column("pain", categories=("none", "mild", "severe"), fill=1.0),
    )
    prepared = Preprocess(Transform(columns=columns))(torch.tensor([[40.0, NAN, 2.0], [50.0, 180.0, NAN]]))
    assert prepared.tolist() == [[40, 200, 1, 0, 0, 1], [50, 180, 0, 0, 1, 0]]
    assert Transform(columns=columns).input_shape((3,)) == (6,)


def test_columns_are_standardised_after_they_became_inputs() -> None:
    transform = Transform((1.0, 0.5), (2.0, 0.5), columns=(Column("a", fill=3.0, indicator=True),))
    prepared = Preprocess(transform, torch.float64)(torch.tensor([[5.0], [NAN]]))
    assert prepared.tolist() == [[2.0, -1.0], [1.0, 1.0]]


def test_only_images_of_bytes_are_scaled() -> None:
    def prepared(x: Tensor) -> Tensor:
        made: Tensor = Preprocess(Transform())(x)
        return made

    assert prepared(torch.full((1, 3, 2, 2), 255, dtype=torch.uint8)).unique().tolist() == [1.0]
    for shape in ((1, 5), (1, 4, 5)):
        tokens = torch.full(shape, 255, dtype=torch.uint8)
        assert torch.equal(prepared(tokens), tokens)
    assert torch.equal(prepared(torch.tensor([[7, 30_000]])), torch.tensor([[7, 30_000]]))


def test_channels_may_lie_along_any_axis() -> None:
    transform = Transform((1.0, 10.0), (1.0, 5.0), axis=1)
    series = torch.tensor([[[2.0, 20.0], [3.0, 5.0], [1.0, 10.0]]])  # (1, T, F)
    assert Preprocess(transform)(series).tolist() == [[[1, 2], [2, -1], [0, 0]]]


def test_a_network_may_call_view() -> None:
    """As in PyTorch's own tutorial: x.view(-1, ...) between convolutions and dense layers."""

    class Tutorial(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)
            self.fc = nn.Linear(4 * 6 * 6, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.fc(self.conv(x).view(-1, 4 * 6 * 6))
            return out

    network = Tutorial()
    model = make_model(network, (3, 8, 8), 2, Transform((0.5,) * 3, (0.5,) * 3), sample_type=torch.uint8)
    x = torch.randint(0, 256, (5, 3, 8, 8), dtype=torch.uint8).to(memory_format=torch.channels_last)
    torch.testing.assert_close(model(model.start, x), network(x.contiguous() / 255 * 2 - 1))


def test_tokens_reach_an_embedding() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.fc = nn.Embedding(300, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.fc(self.embed(x).mean(1))
            return out

    network, x = Words(), torch.tensor([[1, 299, 5]])
    model = make_model(network, (3,), 2, sample_type=torch.int64)
    torch.testing.assert_close(model(model.start, x), network(x))
