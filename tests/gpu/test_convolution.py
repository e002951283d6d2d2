"""The kernels of fused convolutions against plain torch. Without a GPU, Triton interprets them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.gpu.convolution import Geometry
from coterie.gpu.kernels import convolution as conv

SHAPES = [Geometry(8, 8, 3, 5, 0), Geometry(9, 7, 4, 3, 1), Geometry(8, 9, 2, 4, 0), Geometry(7, 7, 3, 5, 2)]
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)


def plain_windows(x: Tensor, shape: Geometry) -> Tensor:
    padded = F.pad(x, (shape.padding,) * 4)
    seen = padded.unfold(2, shape.side, 2).unfold(3, shape.side, 2)[:, :, : shape.rows, : shape.columns]
    return seen.permute(0, 2, 3, 4, 5, 1).reshape(-1, shape.entries)


@pytest.mark.parametrize("shape", SHAPES)
def test_windows_and_their_adjoint(shape: Geometry) -> None:
    x = torch.randn(2, shape.channels, shape.height, shape.width, dtype=torch.float64, requires_grad=True)
    made = conv.windows(x.detach(), shape, torch.float64, None, None)
    expected = plain_windows(x, shape)
    assert torch.equal(made[:, : shape.entries], expected)
    assert bool((made[:, shape.entries] == 1).all())  # for the bias
    assert not made[:, shape.entries + 1 :].any()
    slopes = torch.randn_like(made)
    (gradient,) = torch.autograd.grad(expected, x, slopes[:, : shape.entries])
    torch.testing.assert_close(conv.fold(slopes, shape, 2).movedim(3, 1), gradient, rtol=0, atol=1e-14)


@pytest.mark.parametrize("planar", [True, False])
def test_raw_pixels_are_normalized_as_they_are_read(planar: bool) -> None:
    shape = Geometry(8, 8, 3, 3, 1)
    x = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    mean, std = torch.tensor(MEAN, dtype=torch.float64), torch.tensor(STD, dtype=torch.float64)
    normal = (x.double() / 255 - mean[:, None, None]) / std[:, None, None]  # padding comes after this
    given = x if planar else x.contiguous(memory_format=torch.channels_last)
    made = conv.windows(given, shape, torch.float64, mean, std)[:, : shape.entries]
    torch.testing.assert_close(made, plain_windows(normal, shape), rtol=0, atol=1e-12)


def test_the_largest_of_four_wins_and_nan_is_not_lost() -> None:
    four = torch.randn(37, 4, 6)
    four[0, 2, 0] = torch.nan
    four[1, :, 1] = 2.0  # a tie: the first, as in torch
    out, winner = conv.pool(four, 0.01)
    assert bool(out[0, 0].isnan())
    assert int(winner[1, 1]) == 0
    assert torch.equal(out[1:], F.leaky_relu(four.amax(1), 0.01)[1:])
    assert torch.equal(winner[1:].long(), four.argmax(1)[1:])
