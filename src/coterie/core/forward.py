"""Call a network, and take the one tensor of outputs from what it returns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import fields, is_dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from coterie.core.errors import CoterieError
from coterie.core.tree import Tree


def forward(network: nn.Module, x: Tensor, weights: Tree | None = None) -> Tensor:
    """The outputs (B, ...) of a network, with these weights instead of its own."""
    made = network(x) if weights is None else functional_call(network, weights, (x,))
    return made if isinstance(made, Tensor) else only_tensor(made)


def only_tensor(output: object) -> Tensor:
    """The one tensor of an output with several fields, such as the logits of a network of transformers."""
    tensors = {name: part for name, part in parts(output) if isinstance(part, Tensor)}
    if len(tensors) != 1:
        found = f" with the tensors {', '.join(tensors)}" if tensors else " without a tensor"
        raise CoterieError(
            f"the model returns {type(output).__name__}{found}; it must return one tensor of outputs: wrap it in a "
            "module whose forward returns the tensor to train on"
        )
    return next(iter(tensors.values()))


def parts(output: object) -> Iterable[tuple[str, object]]:
    """The fields of an output, by name."""
    if isinstance(output, Mapping):
        return output.items()
    if is_dataclass(output):
        return ((f.name, getattr(output, f.name)) for f in fields(output))
    if isinstance(output, tuple | list):
        return zip(getattr(output, "_fields", None) or map(str, range(len(output))), output, strict=True)
    return ()


@contextmanager
def attention_for_vmap(device: torch.device) -> Iterator[None]:
    """Attention as vmap computes it: by the parts of nn.TransformerEncoderLayer, and on a CPU as matrix products.

    vmap has no rule for torch's fused kernels of both.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH) if device.type == "cpu" else nullcontext():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
