"""Draw samples of many clients in one pass: gather, random crop and flip.

c: clients, n: images of a client, B: images drawn, (C, H, W): an image.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coterie.core import ops
from coterie.core.data import Transform
from coterie.gpu import devices
from coterie.gpu.registration import Operation


def _kernel(x: Tensor, index: Tensor, bits: Tensor, crop: int, flip: bool) -> Tensor:
    """Images (c, n, C, H, W), index and random bits (c, B) -> (c, B, C, H, W)."""
    from coterie.gpu.kernels import sampling

    return sampling.draw(x, index, bits, crop, flip)


def _reference(x: Tensor, index: Tensor, bits: Tensor, crop: int, flip: bool) -> Tensor:
    transform = Transform(crop=crop, flip=flip)
    drawn = [ops.Operations().draw(*client, transform) for client in zip(x, index, bits, strict=True)]
    return torch.stack(drawn).contiguous()  # crops are channels last


draw = Operation("draw", _kernel, _reference)


def take(x: Tensor, index: Tensor) -> Tensor:
    """x[index] for images x (n, C, H, W) that all clients share and an index (c, B); other samples by torch."""
    if not devices.runs_triton(x.device) or x.ndim != 4:
        return x[index]
    images: Tensor = draw(x.expand(len(index), *x.shape), index, index, 0, False)
    return images
