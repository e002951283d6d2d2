"""Networks with attention: a transformer encoder for sequences, and a small vision transformer.

Layers are pre-norm. Attention uses linear layers and torch's scaled_dot_product_attention, or its formula under vmap.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import _functorch as functorch

from coterie.core.errors import CoterieError
from coterie.models.network import Network, Shape, check_image
from coterie.models.series import Masked, TokenEmbedding, chain, check_sequence


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, real: Tensor | None = None) -> Tensor:
    """softmax(q kᵀ / √d) v for (B, heads, T, d). Under vmap as matrix products: the CPU kernel has no vmap rule.

    causal: a position sees itself and those before it. real: (B, T) positions that are seen, if not all.
    """
    seen = None if real is None else real[:, None, None]
    if not _under_vmap(q):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=causal)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ v


def _under_vmap(x: Tensor) -> bool:
    while functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_batchedtensor(x):
            return True
        x = functorch.get_unwrapped(x)
    return False


class SelfAttention(nn.Module):
    """(B, T, width) -> (B, T, width)."""

    def __init__(self, width: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (B, heads, T, width / heads)
        mixed: Tensor = self.out(attend(q, k, v, self.causal, real).transpose(1, 2).flatten(2))
        return mixed


class AttentionBlock(Masked):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), SelfAttention(width, heads, causal))
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        norm, attention = self.attention
        x = x + attention(norm(x), real)
        result: Tensor = x + self.mlp(x)
        return result


class AddPositions(nn.Module):
    """(B, T, width) + (T, width) learned positions. shorter: whether fewer steps are taken, too."""

    def __init__(self, length: int, width: int, shorter: bool = False) -> None:
        super().__init__()
        self.shorter = shorter
        self.weight = nn.Parameter(nn.init.normal_(torch.empty(length, width), std=0.02))

    def forward(self, x: Tensor) -> Tensor:
        steps = x.shape[1]
        if steps > len(self.weight) or (steps < len(self.weight) and not self.shorter):
            raise CoterieError(f"this transformer takes sequences of {len(self.weight)} steps, got {steps}")
        return x + self.weight[:steps]


class MeanOverPositions(Masked):
    """(B, T, width) -> (B, width)."""

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        if real is None:
            return x.mean(1)
        return torch.where(real[..., None], x, 0.0).sum(1) / real.sum(1, keepdim=True)


class Patches(nn.Module):
    """(B, C, H, W) -> (B, T, C * patch * patch): the patches of an image, row by row."""

    def __init__(self, patch: int) -> None:
        super().__init__()
        self.patch = patch

    def forward(self, x: Tensor) -> Tensor:
        _, channels, height, width = x.shape
        rows, columns = height // self.patch, width // self.patch
        tiles = x.reshape(-1, channels, rows, self.patch, columns, self.patch)
        return tiles.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def transformer(
    shape: Shape,
    classes: int,
    vocabulary: int | None = None,
    depth: int = 4,
    per_token: bool = False,
    padding: float | None = None,
) -> Network:
    """A transformer for tokens (T,) or series (T, F): width 128, 4 heads, mean over positions; d = 128.

    vocabulary: number of different tokens, for tokens only. depth: number of layers. per_token: an output for every
    position, which sees itself and those before it, instead of one for the sequence. padding: token, or
    number in all features, at the end of sequences that are shorter than others; it is neither seen nor averaged.
    """
    check_sequence("transformer", shape, vocabulary, padding)
    _at_least_one("transformer", depth=depth)
    embed = nn.Linear(shape[1], 128) if vocabulary is None else TokenEmbedding(vocabulary, 128)
    encoder = _encoder([embed], shape[0], 128, depth, heads=4, per_token=per_token, padding=padding)
    return Network(encoder, nn.Linear(128, classes))


def vit_tiny(shape: Shape, classes: int, patch: int = 4, depth: int = 6) -> Network:
    """A vision transformer for small images: width 192, 3 heads, mean over patches; d = 192.

    patch: side of a patch in pixels. depth: number of layers.
    """
    check_image("vit-tiny", shape)
    _at_least_one("vit-tiny", patch=patch, depth=depth)
    channels, height, width = shape
    if height % patch or width % patch:
        raise CoterieError(
            f"model 'vit-tiny' takes images whose height and width are multiples of patch={patch}, "
            f"got samples of shape {shape}"
        )
    embed = [Patches(patch), nn.Linear(channels * patch * patch, 192)]
    length = (height // patch) * (width // patch)
    return Network(_encoder(embed, length, 192, depth, heads=3), nn.Linear(192, classes))


def _encoder(
    embed: list[nn.Module],
    length: int,
    width: int,
    depth: int,
    heads: int,
    per_token: bool = False,
    padding: float | None = None,
) -> nn.Sequential:
    blocks = [AttentionBlock(width, heads, causal=per_token) for _ in range(depth)]
    end = [] if per_token else [MeanOverPositions()]
    seen = None if per_token else padding  # which comes after all that a causal position sees
    return chain(seen, *embed, AddPositions(length, width, seen is not None), *blocks, nn.LayerNorm(width), *end)


def _at_least_one(name: str, **options: int) -> None:
    for option, value in options.items():
        if not isinstance(value, int) or value < 1:
            raise CoterieError(f"{option} of model '{name}' must be a positive integer, got {value!r}")
