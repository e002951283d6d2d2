"""A network as pure functions: encoder x -> z, head z -> output. Weights are arguments, never attributes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from coterie.core import dropout, padding
from coterie.core.data import Transform
from coterie.core.ends import check_end
from coterie.core.errors import CoterieError
from coterie.core.forward import forward
from coterie.core.head import NetworkSplit, NoHead, feature_axis, split_head
from coterie.core.layers import NORMS, Norm, check_forward, copied, frozen_of, is_frozen, own_copy, weights_of
from coterie.core.metrics import SummedMetric
from coterie.core.packing import Inputs
from coterie.core.preprocess import Preprocess
from coterie.core.task import Classification, Task, check_loss
from coterie.core.tree import Live, Tree, apply, fill, flatten
from coterie.core.trial_input import trial_input
from coterie.core.trimming import NEVER, Trimming, verified

if TYPE_CHECKING:
    from coterie.core.batch import Batch

FROZEN = "frozen."  # prefix of the names of frozen tensors


class Weights(NamedTuple):
    """The trained tensors of a network, by name, including BatchNorm's running statistics."""

    encoder: Tree  # θ in the papers
    head: Tree  # φ


@dataclass(frozen=True)
class Model:
    """A network, how it prepares raw samples, and the weights that every client starts from."""

    encoder: nn.Module
    head: nn.Module
    start: Weights = field(repr=False)
    dim: int  # d, length of z
    features_along: int  # axis of features (B, ...) along which z lies; 0: unknown
    task: Task
    preprocess: Preprocess
    precision: str = "fp32"  # of matrix products: fp32, tf32, or bf16; sums and weights keep their type
    head_name: str = ""  # name of the head in the user's network; empty: the encoder is all of it
    headless: str = ""  # why the network has no head, if none was found
    label: tuple[int, ...] = ()  # shape of one label
    draws: str = ""  # layers that draw random numbers in training, such as dropout; empty: none
    hashed: bool = False  # whether all of them draw from the hash of core/random.py, not from torch's stream
    trimming: Trimming = NEVER  # of batches to their longest sequence, where the network ignores padding

    @property
    def classes(self) -> int:
        """K; 0 if the task has no classes."""
        return self.task.classes

    @property
    def frozen(self) -> Tree:
        """Frozen parameters and constant buffers by dotted name, shared by all clients."""
        parts = ((name, getattr(self, name), weights) for name, weights in self.start._asdict().items())
        return {f"{part}.{n}": t for part, module, own in parts for n, t in frozen_of(module, own).items()}

    @property
    def initial(self) -> Tree:
        """What a client needs to join: the initial weights and the frozen tensors."""
        return flatten(self.start) | {f"{FROZEN}{name}": t for name, t in self.frozen.items()}

    def begin_from(self, initial: Tree) -> Model:
        """The same network with these tensors, named as in `initial`."""
        parts: dict[str, Any] = {}
        for part in self.start._fields:
            parts[part] = copied(getattr(self, part))
            prefix = f"{FROZEN}{part}."
            own = {n.removeprefix(prefix): t for n, t in initial.items() if n.startswith(prefix)}
            parts[part].load_state_dict(own, strict=False)
        return replace(self, **parts, start=fill(self.start, initial))

    @property
    def feature_axis(self) -> int:
        """The axis of features (B, ...) along which their vectors z lie: 1 if there is one vector for each sample."""
        if not self.features_along:
            raise CoterieError(
                f"this method reads features as vectors, and the head '{self.head_name}' does not tell along which "
                "axis of its input they lie; name a head that begins with a linear layer or a convolution, with "
                "head=... or --head, or use another method, such as fedavg"
            )
        return self.features_along

    @property
    def mean(self) -> Tensor:
        """(C,) Its dtype and device are those of the whole model."""
        return self.preprocess.mean

    def __call__(self, weights: Weights, x: Tensor) -> Tensor:
        """(B, ...) raw samples -> (B, K) logits, or other outputs of the task."""
        return self.logits(weights.head, self.features(weights.encoder, x))

    def features(self, encoder: Tree, x: Tensor) -> Tensor:
        """(B, ...) raw samples -> (B, d); for pixels (B, d, H, W), for tokens (B, T, d)."""
        return self._call(self.encoder, encoder, self.prepare(self.trimming(x, isinstance(encoder, Live))))

    def logits(self, head: Tree, z: Tensor) -> Tensor:
        """(B, d) features -> (B, K) logits, or other outputs of the task, in the units of its labels."""
        return self.task.scale(self._call(self.head, head, z))

    def total(self, *outputs: Tensor) -> Tensor:
        """The sum of what several heads return, where the offset of the labels' units counts once."""
        offset = self.task.scale(torch.zeros_like(outputs[0]))
        return torch.stack(outputs).sum(0) - (len(outputs) - 1) * offset

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        """(B,) the task's loss of every sample."""
        return self.task.loss(output, batch.y)

    def maps(self, encoder: Tree, x: Tensor) -> tuple[list[Tensor], Tensor]:
        """The output (B, C, H, W) of each block of an nn.Sequential encoder, and the features (B, d).

        A block is a layer with convolutions and the layers after it up to the next one.
        """
        if not isinstance(self.encoder, nn.Sequential):
            raise CoterieError("the maps of this encoder are not available; it must be an nn.Sequential")
        maps: list[Tensor] = []
        _as_in_training(self.encoder, isinstance(encoder, Live))
        given, z = self.prepare(x), x.new_empty(0)
        for name, layer in self.encoder._modules.items():  # named_children() skips an activation that is used twice
            assert layer is not None
            begins = any(isinstance(m, nn.Conv2d) for m in layer.modules())
            own = {n.removeprefix(f"{name}."): t for n, t in encoder.items() if n.startswith(f"{name}.")}
            with self._precision(), self._padding(), self._dropout(encoder):
                given = z = forward(layer, given, own)
            if begins:
                maps.append(z)
            elif maps and z.ndim == 4 and z.shape[2:].numel() > 1:  # a map of one pixel has no information
                maps[-1] = z
        if not maps:
            raise CoterieError("this encoder has no convolutions, so there are no maps to compare")
        return maps, z.to(self.mean.dtype)

    def prepare(self, x: Tensor) -> Inputs:
        """Raw samples -> the input of the network; several inputs, by name."""
        prepared: Inputs = self.preprocess(x)
        return prepared

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Model:
        def move(t: Tensor) -> Tensor:
            return t.to(device, dtype if t.is_floating_point() else None)

        return replace(
            self,
            encoder=copied(self.encoder).to(device, dtype),
            head=copied(self.head).to(device, dtype),
            start=apply(move, self.start),
            preprocess=copy.deepcopy(self.preprocess).to(device, dtype),
            task=copy.deepcopy(self.task).to(device, dtype),
        )

    def _call(self, module: nn.Module, weights: Tree, x: Inputs) -> Tensor:
        _as_in_training(module, isinstance(weights, Live))  # weights that are not trained here: evaluation mode
        with self._precision(), self._padding(), self._dropout(weights):
            return forward(module, x, weights).to(self.mean.dtype)

    def _precision(self) -> AbstractContextManager[object]:
        if self.precision != "bf16":
            return nullcontext()
        return torch.autocast(self.mean.device.type, torch.bfloat16, cache_enabled=False)

    def _padding(self) -> AbstractContextManager[object]:
        widen = self.normalizes and self.precision == "bf16"
        return padding.left_out(widen) if self.batch_norm or widen else nullcontext()

    def _dropout(self, weights: Tree) -> AbstractContextManager[object]:
        return dropout.hashed() if self.hashed and isinstance(weights, Live) else nullcontext()

    @property
    def hidden_draws(self) -> str:
        """Layers that draw from torch's stream, which stacked clients would share; empty: none."""
        return "" if self.hashed else self.draws

    @property
    def layers(self) -> tuple[nn.Module, ...]:
        return *self.encoder.modules(), *self.head.modules()

    @cached_property
    def batch_norm(self) -> bool:
        """Whether the network has BatchNorm, so that the samples of a batch influence each other."""
        return any(isinstance(layer, Norm) for layer in self.layers)

    @cached_property
    def normalizes(self) -> bool:
        """Whether the network has a normalization layer of any kind."""
        return any(isinstance(layer, NORMS) for layer in self.layers)

    @property
    def minds_padding(self) -> bool:
        """Whether padding changes the outputs of real samples: a layer like BatchNorm that is not handled."""
        return not all(map(padding.is_left_out_by, self.layers))

    @property
    def tests_by_client(self) -> bool:
        """Whether a client's samples must be evaluated together: for a layer like BatchNorm, or for the metric."""
        return self.tests_by_batch or not isinstance(self.task.metric, SummedMetric)

    @property
    def tests_by_batch(self) -> bool:
        """Whether samples influence each other in evaluation too: BatchNorm without running statistics."""
        return any(isinstance(layer, Norm) and layer.running_mean is None for layer in self.layers)


def _as_in_training(module: nn.Module, training: bool) -> None:
    if module.training == training:
        return
    module.train(training)
    for layer in module.modules() if training else ():
        if is_frozen(layer):
            layer.eval()  # its statistics do not change


def check_types(network: nn.Module) -> None:
    """Refuse trained parameters of different types; features and losses have one type."""
    types = {p.dtype: name for name, p in network.named_parameters() if p.requires_grad}
    if len(types) > 1:
        named = ", ".join(f"'{name}' is {str(kind).removeprefix('torch.')}" for kind, name in types.items())
        raise CoterieError(f"the parameters of the network have different types ({named}); convert it: network.float()")


def make_model(
    network: nn.Module,
    shape: tuple[int, ...],
    task: Task | int,
    transform: Transform | None = None,
    head: str | None = None,
    sample_type: torch.dtype = torch.float32,
    label: tuple[int, ...] = (),
) -> Model:
    """A Model from any network. head: name of its head, if not the one that `split_head` finds.

    task: an int stands for classification into that many classes. shape, sample_type: of one raw sample; label: the
    shape of one label. Parameters with requires_grad=False are frozen: they are shared by all
    clients, never trained and never sent in a round.
    """
    network = own_copy(network)
    trained = [p for p in network.parameters() if p.requires_grad]
    if not trained:
        frozen = any(True for _ in network.parameters())
        what = "has no parameters" if not frozen else "is frozen, all its parameters have requires_grad=False"
        raise CoterieError(f"the model {what}: there is nothing to train")
    check_types(network)
    transform = transform or Transform()
    preprocess = Preprocess(transform, trained[0].dtype)
    task = Classification(task) if isinstance(task, int) else copy.deepcopy(task)
    x, expected = trial_input(network, preprocess, shape, sample_type)
    if len(expected[0]) != 2:
        raise CoterieError(f"the model returns {len(expected[0])} outputs for 2 samples, it must return one for each")
    task.check_output(tuple(expected[0].shape[1:]), label)
    check_loss(task, expected[0], label)
    check_end(network, x, task)
    draws = check_forward(network, x, expected)
    about: dict[str, Any] = {"label": label, "draws": draws}
    about["hashed"] = bool(draws) and dropout.is_replaced(network, x)
    fixed = (task.to(dtype=trained[0].dtype), preprocess)
    try:
        made = joined(split_head(network, x, expected, head), x, *fixed, about)
    except NoHead as error:
        if head is not None:
            raise
        whole = NetworkSplit(copy.deepcopy(network), nn.Identity(), "")
        made = joined(whole, x, *fixed, {**about, "headless": str(error)})
    return replace(made, trimming=verified(made.features, made.start.encoder, transform, shape, sample_type))


def joined(parts: NetworkSplit, x: Inputs, task: Task, preprocess: Preprocess, about: Mapping[str, Any]) -> Model:
    """The model of an encoder and a head, which must be given a vector where a sample has one class."""
    start = Weights(weights_of(parts.encoder), weights_of(parts.head))
    model = Model(parts.encoder, parts.head, start, 0, 0, task, preprocess, head_name=parts.name, **about)
    with torch.no_grad():
        z = model._call(parts.encoder, start.encoder, x)
    if z.ndim != 2 and task.one_class:
        raise NoHead(
            f"the head '{parts.name}' is given features of shape {tuple(z.shape[1:])}, it must be given a vector for "
            "each sample; name another head with head=... or --head"
        )
    axis = feature_axis(parts.head, z, task.class_axis)
    return replace(model, dim=z.shape[axis or -1], features_along=axis)
