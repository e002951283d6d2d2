"""Drawn samples against the plain operation. Without a GPU, Triton interprets the kernel."""

from __future__ import annotations

import pytest
import torch
from torch.func import vmap

from coterie.core import random
from coterie.core.data import Transform
from coterie.core.ops import augment
from coterie.gpu import sampling
from coterie.gpu.kernels import sampling as kernels

pytestmark = pytest.mark.usefixtures("interpreted")


@pytest.mark.parametrize("transform", [Transform(crop=2, flip=True), Transform(crop=1), Transform(flip=True)])
def test_draws_are_the_plain_ones(transform: Transform) -> None:
    x = torch.randint(0, 256, (2, 7, 3, 9, 10), dtype=torch.uint8)
    index = torch.randint(0, 7, (2, 5))
    bits = random.bits(random.seed_key(3), torch.arange(10)).view(2, 5)
    made = kernels.draw(x, index, bits, transform.crop, transform.flip)
    for c in range(2):
        assert torch.equal(made[c], augment(x[c][index[c]], bits[c], transform))
    under_vmap = vmap(lambda x, i, b: sampling.draw(x[None], i[None], b[None], transform.crop, transform.flip)[0])
    assert torch.equal(under_vmap(x, index, bits), made)
