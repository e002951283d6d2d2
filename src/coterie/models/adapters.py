"""Train a part of a network: `freeze` all but some parameters, or adapt linear layers by matrices of low rank (LoRA).

What has requires_grad=False is shared by all clients: it is not trained, not copied for each client and not sent in a
round. Adapters of the library peft work in the same way.
"""

from __future__ import annotations

import copy
import math
from fnmatch import fnmatchcase
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.core.errors import CoterieError
from coterie.core.names import matching


def freeze(network: nn.Module, except_: str) -> nn.Module:
    """A copy of the network in which only some parameters are trained; all others are frozen.

    except_: what is trained: names of parameters or modules, with `*` for any text, separated by `|`, such as
    "head|blocks.11.*".

    >>> import coterie, torch
    >>> network = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> probe = coterie.freeze(network, except_="2")
    >>> [name for name, p in probe.named_parameters() if p.requires_grad]
    ['2.weight', '2.bias']
    """
    frozen = copy.deepcopy(network)
    trained = matching("parameter", except_, [name for name, _ in frozen.named_parameters()])
    for name, parameter in frozen.named_parameters():
        parameter.requires_grad_(name in trained)
    return frozen


def lora(
    network: nn.Module, targets: str, rank: int = 8, alpha: float | None = None, except_: str | None = None
) -> nn.Module:
    """A copy of the network with trainable adapters of low rank on some linear layers; all else is frozen.

    An adapted layer computes W x + b + (alpha / rank) B A x, where A (rank, in) is random and B (out, rank) starts at
    zero, so that the network starts as it was (Hu et al., 2022). peft has more kinds of adapters; this one needs no
    other library.

    targets: names of linear layers, or of modules that contain them, with `*` for any text, separated by `|`, such as
    "*.qkv|*.out". alpha: default: rank. except_: further parameters that are trained, as for `freeze`, such as "head".

    >>> import coterie, torch
    >>> network = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> adapted = coterie.lora(network, "0", rank=2, except_="2")
    >>> [name for name, p in adapted.named_parameters() if p.requires_grad]
    ['0.lora_A', '0.lora_B', '2.weight', '2.bias']
    """
    if not isinstance(rank, int) or rank < 1:
        raise CoterieError(f"rank must be a positive integer, got {rank!r}")
    adapted = copy.deepcopy(network)
    trained = matching("parameter", except_, [n for n, _ in adapted.named_parameters()]) if except_ else frozenset()
    for name, parameter in adapted.named_parameters():
        parameter.requires_grad_(name in trained)
    linear = {name: layer for name, layer in adapted.named_modules() if type(layer) is nn.Linear and name}
    refuse_attention(adapted, targets, list(linear))
    for name in sorted(matching("linear layer", targets, list(linear))):
        if any(p.requires_grad for p in linear[name].parameters()):
            raise CoterieError(f"layer '{name}' is named in targets and in except_; adapt it or train it")
        put(adapted, name, LoRALinear(linear[name], rank, rank if alpha is None else alpha))
    return adapted


def refuse_attention(network: nn.Module, targets: str, linear: list[str]) -> None:
    """Refuse targets that match nothing but projections of nn.MultiheadAttention, which does not call them."""
    layers = [name for name, layer in network.named_modules() if isinstance(layer, nn.MultiheadAttention)]
    inside = [f"{name}.{part}" for name in layers for part in ("out_proj", "in_proj_weight")]
    for target in targets.split("|"):
        found = {name for name in (*linear, *inside) if fnmatchcase(name, target) or fnmatchcase(name, f"{target}.*")}
        if found and found <= {*inside}:
            raise CoterieError(
                f"target '{target}' names projections of an nn.MultiheadAttention, '{min(found)}', which uses their "
                "weights without calling a layer, so they cannot be adapted; adapt other linear layers, train these by "
                "except_, or take a network whose attention has layers of its own, such as those of timm"
            )


class LoRALinear(nn.Module):
    """W x + b + scale B A x, with W and b frozen."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base, self.scale = base, alpha / rank
        self.lora_A = nn.Parameter(base.weight.new_empty(rank, base.in_features))
        self.lora_B = nn.Parameter(base.weight.new_zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))  # as nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        adapted: Tensor = self.base(x) + self.scale * F.linear(F.linear(x, self.lora_A), self.lora_B)
        return adapted

    def merged(self) -> nn.Linear:
        """One linear layer that computes the same."""
        with torch.no_grad():
            self.base.weight += self.scale * self.lora_B @ self.lora_A
        return self.base


def merge(network: nn.Module) -> nn.Module:
    """A copy with the adapters folded into the weights that they adapt, so that only plain layers are left."""
    merged = copy.deepcopy(network)
    if is_peft(merged):
        merged = merged.merge_and_unload()  # type: ignore[operator]
    if isinstance(merged, LoRALinear):
        return merged.merged()
    for name, layer in list(merged.named_modules()):
        if isinstance(layer, LoRALinear):
            put(merged, name, layer.merged())
    return merged


def is_peft(network: nn.Module) -> bool:
    """Whether it is what peft's get_peft_model returns."""
    return hasattr(network, "merge_and_unload") and hasattr(network, "save_pretrained")


def save_adapter(network: nn.Module, folder: Path) -> list[Path]:
    """Write the adapter of a peft network in peft's format, without the network that it adapts."""
    if not is_peft(network):
        raise CoterieError("this network has no adapter of peft; use another form, such as safetensors")
    from peft import get_peft_model_state_dict

    held = {t.data_ptr() for t in get_peft_model_state_dict(network, save_embedding_layers=False).values()}
    for name, parameter in network.named_parameters():
        if parameter.requires_grad and parameter.data_ptr() not in held:
            raise CoterieError(
                f"'{name}' is trained but is no part of the adapter, so peft's format cannot hold it; name its module "
                "in modules_to_save, or export the merged network with --merge"
            )
    network.save_pretrained(folder, save_embedding_layers=False)  # type: ignore[operator]
    return sorted(folder.iterdir())


def put(network: nn.Module, name: str, layer: nn.Module) -> None:
    """Replace a module of the network, given by its dotted name."""
    owner, _, last = name.rpartition(".")
    setattr(network.get_submodule(owner), last, layer)
