"""Prepare raw samples inside the model, so that predictions take raw samples."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from coterie.core.data import MISSING, VALUE, Transform, is_pixels
from coterie.core.packing import Inputs, unpack
from coterie.core.padding import real_steps


class Preprocess(nn.Module):
    """Scale pixels to 0..1, fill missing values, one-hot encode categories, standardize channels; keep tokens.

    Several inputs are unpacked, and each is prepared by itself.
    """

    mean: Tensor  # (C,) of the prepared channels; empty: not standardized
    std: Tensor  # (C,)
    fill: Tensor  # (F,) replaces missing values of a column
    column: Tensor  # (E,) the source column of each input; empty: samples are used as they are
    kind: Tensor  # (E,) VALUE, MISSING, or the code of a category

    def __init__(self, transform: Transform, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.axis, self.padding = transform.axis, transform.padding
        self.channels_last = True  # whether images keep this memory format; False for networks that call .view
        self.register_buffer("mean", torch.tensor(transform.mean, dtype=dtype))
        self.register_buffer("std", torch.tensor(transform.std, dtype=dtype))
        fills = [math.nan if column.fill is None else column.fill for column in transform.columns]
        inputs = [(at, kind) for at, column in enumerate(transform.columns) for kind in column.inputs]
        plain = all(column.plain for column in transform.columns)
        self.register_buffer("fill", torch.tensor([] if plain else fills, dtype=dtype))
        self.register_buffer("column", torch.tensor([] if plain else [at for at, _ in inputs], dtype=torch.int64))
        self.register_buffer("kind", torch.tensor([] if plain else [kind for _, kind in inputs], dtype=torch.int64))
        self.inputs = transform.inputs
        own = (Transform(one.mean, one.std, axis=one.axis, padding=one.padding) for one in self.inputs)
        self.parts = nn.ModuleList(Preprocess(one, dtype) for one in own)

    def forward(self, x: Inputs) -> Inputs:
        """(B, ...) raw -> (B, ...) prepared. Several inputs: (B, bytes) packed, or by name -> by name."""
        if self.inputs:
            raw = unpack(self.inputs, x) if isinstance(x, Tensor) else x
            return {one.name: part(raw[one.name]) for one, part in zip(self.inputs, self.parts, strict=True)}
        assert isinstance(x, Tensor)
        return self.prepared(x) if x.ndim > 1 else self.prepared(x[:, None])[:, 0]

    def prepared(self, x: Tensor) -> Tensor:
        unit = 255 if is_pixels(tuple(x.shape[1:]), x.dtype) else 1
        if self.column.numel():
            x = self.expand(x.to(self.mean.dtype))
        if not (self.mean.numel() or x.is_floating_point() or unit != 1):
            return x  # tokens
        if self.padding is not None and self.mean.numel() and x.ndim > 2:  # padding is no value, and stays what it is
            real = real_steps(x, self.padding).view(*x.shape[:2], *[1] * (x.ndim - 2))
            x = torch.where(real, self.standardized(x, unit), self.padding)
            return x if self.channels_last else x.contiguous()
        return self.standardized(x, unit)

    def standardized(self, x: Tensor, unit: int) -> Tensor:
        x = x.movedim(1 + self.axis, -1).to(self.mean.dtype)  # keeps the channels-last memory format
        x = (x - unit * self.mean) / (unit * self.std) if self.mean.numel() else x / unit
        x = x.movedim(-1, 1 + self.axis)
        return x if self.channels_last else x.contiguous()

    def expand(self, x: Tensor) -> Tensor:
        """(B, F) with NaN where a value is missing -> (B, E)."""
        gap = x.isnan()
        value = torch.where(gap, self.fill, x)[:, self.column]
        made = torch.where(self.kind == MISSING, gap[:, self.column].to(x.dtype), (value == self.kind).to(x.dtype))
        return torch.where(self.kind == VALUE, value, made)
