"""A network as pure functions: encoder x -> z, head z -> logits. Weights are arguments, never attributes."""

from __future__ import annotations

import copy
from collections import OrderedDict
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from coterie.core import padding
from coterie.core.errors import CoterieError, unknown
from coterie.core.samples import Transform
from coterie.core.tree import Live, Tree, apply, is_statistic

PRECISIONS = ("fp32", "tf32", "bf16")


class Weights(NamedTuple):
    """A whole network. Each dictionary: name -> tensor, BatchNorm's running statistics included."""

    encoder: Tree  # θ in the papers
    head: Tree  # φ


@dataclass(frozen=True)
class Model:
    """The shape of a network, what it does with raw samples, and the weights every client starts from."""

    encoder: nn.Module
    head: nn.Module
    start: Weights
    dim: int  # d, length of z
    classes: int  # K
    mean: Tensor  # (C,) of pixels scaled to 0..1; empty: take samples as they are
    std: Tensor  # (C,)
    precision: str = "fp32"  # of matrix products: fp32, tf32, or bf16; sums and weights keep their type

    def __call__(self, weights: Weights, x: Tensor) -> Tensor:
        """(B, ...) raw samples -> (B, K) logits."""
        return self.logits(weights.head, self.features(weights.encoder, x))

    def features(self, encoder: Tree, x: Tensor) -> Tensor:
        """(B, ...) raw samples -> (B, d)."""
        return self._call(self.encoder, encoder, self.normalise(x))

    def logits(self, head: Tree, z: Tensor) -> Tensor:
        return self._call(self.head, head, z)

    def maps(self, encoder: Tree, x: Tensor) -> tuple[list[Tensor], Tensor]:
        """What comes out of each block of a chain of layers, (B, C, H, W), and the features (B, d).

        A block: a layer with convolutions, and those after it up to the next such layer.
        """
        if not isinstance(self.encoder, nn.Sequential):
            raise CoterieError("the inner maps of this encoder cannot be told; it must be an nn.Sequential")
        maps: list[Tensor] = []
        _as_in_training(self.encoder, isinstance(encoder, Live))
        z = self.normalise(x)
        for name, layer in self.encoder._modules.items():  # named_children() skips an activation that is used twice
            assert layer is not None
            begins = any(isinstance(m, nn.Conv2d) for m in layer.modules())
            own = {n.removeprefix(f"{name}."): t for n, t in encoder.items() if n.startswith(f"{name}.")}
            with self._precision(), self._padding():
                z = functional_call(layer, own, (z,))
            if begins:
                maps.append(z)
            elif maps and z.ndim == 4 and z.shape[2:].numel() > 1:  # a map of one pixel tells nothing
                maps[-1] = z
        if not maps:
            raise CoterieError("this encoder has no convolutions, so there are no maps to compare")
        return maps, z.to(self.mean.dtype)

    def normalise(self, x: Tensor) -> Tensor:
        unit = 255 if x.dtype == torch.uint8 else 1
        x = x.movedim(1, -1).to(self.mean.dtype)  # channels last, so that this order in memory survives
        x = (x - unit * self.mean) / (unit * self.std) if self.mean.numel() else x / unit
        return x.movedim(-1, 1)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Model:
        def move(t: Tensor) -> Tensor:
            return t.to(device, dtype if t.is_floating_point() else None)

        return replace(
            self,
            encoder=copy.deepcopy(self.encoder).to(device, dtype),
            head=copy.deepcopy(self.head).to(device, dtype),
            start=apply(move, self.start),
            mean=move(self.mean),
            std=move(self.std),
        )

    def _call(self, module: nn.Module, weights: Tree, x: Tensor) -> Tensor:
        _as_in_training(module, isinstance(weights, Live))  # what is not under training is used as in testing
        with self._precision(), self._padding():
            result: Tensor = functional_call(module, weights, (x,))
        return result.to(self.mean.dtype)

    def _precision(self) -> AbstractContextManager[object]:
        if self.precision != "bf16":
            return nullcontext()
        return torch.autocast(self.mean.device.type, torch.bfloat16, cache_enabled=False)

    def _padding(self) -> AbstractContextManager[object]:
        if not self.batch_norm:
            return nullcontext()
        return padding.left_out(widen=self.precision == "bf16" and self.mean.device.type == "cpu")

    @cached_property
    def batch_norm(self) -> bool:
        """Whether the samples of a batch influence each other."""
        modules = (*self.encoder.modules(), *self.head.modules())
        return any(isinstance(m, nn.modules.batchnorm._NormBase) for m in modules)

    @property
    def minds_padding(self) -> bool:
        """Whether samples that fill up a batch influence the real ones: a layer that is like BatchNorm, but another."""
        return not all(map(padding.is_left_out_by, (*self.encoder.modules(), *self.head.modules())))

    @property
    def tests_by_batch(self) -> bool:
        """Whether they do so in testing too: BatchNorm without running statistics."""
        modules = (*self.encoder.modules(), *self.head.modules())
        return any(isinstance(m, nn.modules.batchnorm._NormBase) and m.running_mean is None for m in modules)


def _as_in_training(module: nn.Module, training: bool) -> None:
    if module.training != training:
        module.train(training)


def set_precision(precision: str, device: torch.device) -> None:
    """Whether products of float32 may round their factors to TF32, in this process."""
    if precision not in PRECISIONS:
        raise unknown("precision", precision, PRECISIONS)
    if precision == "tf32" and device.type != "cuda":
        raise CoterieError("precision tf32 is something that GPUs have; on a CPU take fp32 or bf16")
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.allow_tf32 = precision == "tf32"


def split_head(network: nn.Module, head: str | None = None) -> tuple[nn.Module, nn.Module]:
    """Encoder and head of a network: its own `encoder` and `head`, or the named module, or its last one."""
    network = copy.deepcopy(network)
    parts = dict(network.named_children())
    if head is None and {"encoder", "head"} == set(parts):
        return parts["encoder"], parts["head"]
    if head is None and isinstance(network, nn.Sequential) and len(network) > 1:
        *below, _ = network._modules.items()  # not network[:-1], which a subclass may not be able to make
        return nn.Sequential(OrderedDict(below)), network[-1]
    name = head or next((n for n, m in reversed(list(network.named_modules())) if n and not list(m.children())), None)
    if not name:
        raise CoterieError("this network has no modules inside, so no head can be found; wrap it in nn.Sequential")
    try:
        found = network.get_submodule(name)
    except AttributeError:
        known = ", ".join(n for n, _ in network.named_modules() if n)
        raise CoterieError(f"the network has no module '{name}' to be its head; it has: {known}") from None
    owner, _, last = name.rpartition(".")
    setattr(network.get_submodule(owner), last, nn.Identity())
    return network, found


def make_model(
    network: nn.Module,
    shape: tuple[int, ...],
    classes: int,
    transform: Transform | None = None,
    head: str | None = None,
) -> Model:
    """A Model from any network whose last module is its head, or whose head is named."""
    encoder, top = split_head(network, head)
    for part in (encoder, top):
        for module in part.modules():
            if isinstance(module, nn.modules.batchnorm._NormBase):
                module.num_batches_tracked = None  # only for torch's cumulative average; not a weight
    start = Weights(_weights(encoder), _weights(top))
    transform = transform or Transform()
    dtype = next((t.dtype for part in start for t in part.values()), torch.get_default_dtype())
    mean, std = (torch.tensor(values, dtype=dtype) for values in (transform.mean, transform.std))
    model = Model(encoder, top, start, 0, classes, mean, std)
    try:
        z = model.features(start.encoder, torch.zeros(2, *shape, dtype=dtype))
        logits = model.logits(start.head, z)
    except RuntimeError as error:
        raise CoterieError(f"the model cannot take samples of shape {shape}: {error}") from None
    if z.ndim != 2 or logits.shape != (2, classes):
        raise CoterieError(
            f"the model gives features {tuple(z.shape[1:])} and outputs {tuple(logits.shape[1:])}; "
            f"needed are a feature vector and one output for each of {classes} classes. Is the head named?"
        )
    return Model(encoder, top, start, z.shape[1], classes, mean, std)


def _weights(module: nn.Module) -> Tree:
    named = {n: p.detach().clone() for n, p in module.named_parameters()}
    named.update({n: b.detach().clone() for n, b in module.named_buffers() if is_statistic(n)})
    return named
