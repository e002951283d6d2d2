"""A frozen vision transformer with adapters of rank 8 on the four projections of every attention layer."""

from __future__ import annotations

from torch import Tensor, nn

from coterie.models import Network
from coterie.models.adapters import lora
from coterie.models.attention import AddPositions, MeanOverPositions, Patches, attend

RANK, PATCH, HEADS = 8, 4, 12


class Attention(nn.Module):
    """(B, T, width) -> (B, T, width), with a layer for each projection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        mixed: Tensor = self.out(attend(q, k, v).transpose(1, 2).flatten(2))
        return mixed


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), Attention(width))
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        result: Tensor = x + self.mlp(x)
        return result


def lora_vit(shape: tuple[int, ...], classes: int, width: int, depth: int) -> nn.Module:
    """Adapters and head are trained, the rest is frozen."""
    channels, height, breadth = shape
    embed = [Patches(PATCH), nn.Linear(channels * PATCH * PATCH, width)]
    positions = AddPositions((height // PATCH) * (breadth // PATCH), width)
    blocks = [Block(width) for _ in range(depth)]
    encoder = nn.Sequential(*embed, positions, *blocks, nn.LayerNorm(width), MeanOverPositions())
    whole = Network(encoder, nn.Linear(width, classes))
    return lora(whole, "*.query|*.key|*.value|*.out", rank=RANK, except_="head")
