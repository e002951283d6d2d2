"""Try a network on random samples before a run."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from coterie.core import tree
from coterie.core.data import is_pixels
from coterie.core.errors import CoterieError
from coterie.core.head import outputs
from coterie.core.packing import Inputs, mixed
from coterie.core.preprocess import Preprocess


def trial_input(
    network: nn.Module, preprocess: Preprocess, shape: tuple[int, ...], sample_type: torch.dtype
) -> tuple[Inputs, tuple[Tensor, Tensor]]:
    """Random input (2, ...) of a network, and its outputs. Networks that call .view need contiguous samples.

    shape, sample_type: of one raw sample.
    """
    raw = ready = torch.zeros(2, *shape, dtype=sample_type)
    if raw.is_floating_point():
        raw = raw.to(preprocess.mean.dtype)
    if raw.ndim == 4:
        raw = raw.to(memory_format=torch.channels_last)  # the format of clients' images
    for channels_last in (True, False):
        preprocess.channels_last = channels_last
        try:
            ready = preprocess(raw)
            x = random_like(ready)
            return x, outputs(network, x)
        except (RuntimeError, IndexError, ValueError, TypeError, KeyError) as error:
            failure: Exception = error
    if preprocess.inputs:
        raise CoterieError(
            f"the model cannot take samples with {', '.join(map(str, preprocess.inputs))}: {failure}; to pass integers "
            "as numbers, name the type of an input: clients_from(..., input={'NAME': 'values'})"
        ) from None
    kind = str(raw.dtype).removeprefix("torch.")
    integers = (
        ""
        if raw.is_floating_point() or is_pixels(shape, raw.dtype)
        else "; integers reach the network as they are, for an nn.Embedding, as in --model lstm --model-args "
        "vocabulary=SIZE; if they are features, read them with --input values, if they are gray images, with --input "
        "image"
    )
    sides = " x ".join(map(str, shape))
    coded = f", which are {ready.shape[1]} inputs of the network" if ready.shape[1:] != raw.shape[1:] else ""
    raise CoterieError(f"the model cannot take {kind} samples of shape {sides}{coded}: {failure}{integers}") from None


def random_like(x: Inputs) -> Inputs:
    """Random values like x; integers are below 2, to fit any vocabulary."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        if isinstance(x, Tensor):
            return torch.randn_like(x) if x.is_floating_point() else torch.randint_like(x, 2)
        return tree.apply(_random_part, x)


def _random_part(x: Tensor) -> Tensor:
    return torch.randn_like(x) if x.is_floating_point() else mixed(torch.randint(2, x.shape)).to(x.dtype)
