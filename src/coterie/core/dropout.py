"""Dropout drawn from the hash of core/random.py instead of torch's stream.

A mask depends on the key of the batch (seed, round, client, epoch), the sample, and the number of the call since the
loss of this step began. So a client draws the same masks alone, stacked, padded, or in a replayed CUDA graph.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from coterie.core import random
from coterie.core.context import holding
from coterie.core.errors import CoterieError
from coterie.core.forward import forward
from coterie.core.packing import Inputs, reinterpreted
from coterie.core.tree import apply

LANES, LEVELS = 4, 1 << 16  # 16-bit numbers of a hash; values of each
ALPHA = -1.7580993408473766  # the limit of SELU at minus infinity


@dataclass
class Masks:
    """The masks of one step: a call counter on top of the keys of its samples."""

    key: Tensor  # () of client, round and epoch
    sample: Tensor  # (B,)
    calls: int = 0

    def keep(self, shape: tuple[int, ...], p: float) -> tuple[Tensor, float]:
        """A mask of this shape, False with probability p; and p as it is drawn, a multiple of 2^-16.

        Rows of the first axis belong to the samples in order, the same number to each.
        """
        if shape[0] % len(self.sample):
            raise CoterieError(
                f"dropout in this network is given {shape[0]} rows where the batch has {len(self.sample)} samples; "
                "put the axis of samples first"
            )
        entries = math.prod(shape) // len(self.sample)
        keys = random.derive(random.derive(self.key, self.calls), self.sample)  # (B,)
        self.calls += 1
        places = torch.arange(-(-entries // LANES), device=keys.device)
        lanes = reinterpreted(random.derive(keys[:, None], places), torch.int16)  # (B, entries, rounded up)
        dropped = min(round(p * LEVELS), LEVELS - 1)
        return (lanes[:, :entries] >= dropped - LEVELS // 2).reshape(shape), dropped / LEVELS


_masks: ContextVar[Masks | None] = ContextVar("masks", default=None)


def known(key: Tensor | None, sample: Tensor) -> AbstractContextManager[Masks | None]:
    """Draw the masks of these samples (B,) from a key () inside this block; None: leave them to torch."""
    return holding(_masks, None if key is None else Masks(key, sample))


def hashed() -> AbstractContextManager[object]:
    """Layers inside this block draw from the hash, where a key is known."""
    masks = _masks.get()
    return nullcontext() if masks is None else Hashed(masks)


def is_replaced(network: nn.Module, x: Inputs) -> bool:
    """Whether `hashed` replaces all that the network draws in training: nothing is left to torch's stream, a sample
    (of x, (2, ...)) has the same output alone as in a batch, and no layer runs again in the backward pass, where the
    masks are not known."""
    trial = copy.deepcopy(network).train()
    for layer in trial.modules():
        if isinstance(layer, nn.modules.batchnorm._NormBase):
            layer.eval()
    key, samples = random.seed_key(0), torch.arange(2)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        before = torch.default_generator.get_state()
        try:
            batches = []
            for rows in (slice(0, 2), slice(0, 1), slice(1, 2)):
                with known(key, samples[rows]), hashed():
                    batches.append(forward(trial, apply(lambda t, rows=rows: t[rows], x)))
        except (RuntimeError, ValueError, CoterieError):
            return False
        untouched = torch.equal(before, torch.default_generator.get_state())
    both, *alone = batches
    return (
        untouched
        and not recomputes(trial, x)
        and torch.allclose(torch.cat(alone), both, rtol=1e-3, atol=1e-5, equal_nan=True)
    )


def recomputes(network: nn.Module, x: Inputs) -> bool:
    """Whether layers run again in the backward pass, as with torch.utils.checkpoint. network: changed by the trial."""
    runs = 0

    def count(*given: Any) -> None:
        nonlocal runs
        runs += 1

    hooks = [layer.register_forward_hook(count) for layer in network.modules()]
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            output = forward(network, x)
            before = runs
            output.sum().backward()  # type: ignore[no-untyped-call]
    finally:
        for hook in hooks:
            hook.remove()
    return runs > before


class Hashed(TorchFunctionMode):
    def __init__(self, masks: Masks) -> None:
        super().__init__()
        self.masks = masks

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in BODIES:
            with self:
                return BODIES[func](*args, **kwargs or {})
        if func in DRAWS:
            return drop(self.masks, func, *args, **kwargs or {})
        if func is F.scaled_dot_product_attention:
            return attention(self.masks, *args, **kwargs or {})
        if func in RECURRENT and not isinstance(args[2], Tensor):  # packed sequences: left to torch
            return recurrent(self.masks, func, *args, **kwargs or {})
        return func(*args, **kwargs or {})


def drop(masks: Masks, func: Callable[..., Any], x: Tensor, p: float = 0.5, train: bool = True) -> Tensor:
    """torch.dropout and its relatives: one mask for each entry, or for each channel; zero, or SELU's limit."""
    if not train or p == 0:
        return x
    kind = func.__name__
    shape = (*x.shape[:2], *[1] * (x.ndim - 2)) if "feature" in kind else tuple(x.shape)
    keep, q = masks.keep(shape, p)
    if p == 1:
        made = x * 0
    elif "alpha" in kind:
        scale = ((ALPHA**2 * q + 1) * (1 - q)) ** -0.5
        made = scale * torch.where(keep, x, ALPHA) - scale * ALPHA * q
    else:
        made = x * keep.to(x.dtype).mul_(1 / (1 - q))
    return x.copy_(made) if kind.endswith("_") else made


def attention(
    masks: Masks,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """F.scaled_dot_product_attention of (B, ..., L, E), (B, ..., S, E), (B, ..., S, V), by its definition."""
    if dropout_p == 0:
        how = {"attn_mask": attn_mask, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        return F.scaled_dot_product_attention(query, key, value, **how)  # type: ignore[arg-type]
    if enable_gqa:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights: Tensor = torch.ops.aten._safe_softmax(scores, -1)  # zero where everything is masked
    return drop(masks, torch.dropout, weights, dropout_p) @ value


def recurrent(
    masks: Masks,
    func: Callable[..., Any],
    x: Tensor,
    hidden: Any,
    weights: list[Tensor],
    bias: bool,
    layers: int,
    p: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    """torch.lstm, torch.gru, ...: layer by layer, with dropout on what one layer gives to the next."""
    first, ends = hidden if isinstance(hidden, tuple | list) else (hidden,), []
    each, directions = len(weights) // layers, 2 if bidirectional else 1
    for layer in range(layers):
        if layer:
            rows = x if batch_first else x.transpose(0, 1)
            rows = drop(masks, torch.dropout, rows, p, train)
            x = rows if batch_first else rows.transpose(0, 1)
        begin = [h[layer * directions : (layer + 1) * directions] for h in first]
        own = weights[layer * each : (layer + 1) * each]
        given = begin if len(begin) > 1 else begin[0]
        x, *end = func(x, given, own, bias, 1, 0.0, train, bidirectional, batch_first)
        ends.append(end)
    return x, *(torch.cat(parts) for parts in zip(*ends, strict=True))


def body(function: FunctionType) -> Callable[..., Any]:
    """A Python function of torch without its check for overrides, so that a mode sees what it calls."""

    def never(*tensors: Any) -> bool:
        return False

    around = {**function.__globals__, "has_torch_function": never, "has_torch_function_unary": never}
    made = FunctionType(function.__code__, around, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


DRAWS = {
    getattr(torch, f"{name}{place}")
    for name in ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
    for place in ("", "_")
}
RECURRENT = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}
BODIES: dict[Callable[..., Any], Callable[..., Any]] = {
    function: body(function)  # type: ignore[arg-type]
    for function in (
        F.dropout,
        F.dropout1d,
        F.dropout2d,
        F.dropout3d,
        F.alpha_dropout,
        F.feature_alpha_dropout,
        F.multi_head_attention_forward,
    )
}
