"""Layers with randomness or state of their own: some are handled, others are refused by name.

docs/data.md has the table.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from coterie.core.errors import CoterieError
from coterie.core.forward import forward
from coterie.core.packing import Inputs
from coterie.core.tree import Tree, apply, is_statistic

Norm = nn.modules.batchnorm._NormBase  # BatchNorm and InstanceNorm
NORMS = (Norm, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def is_frozen(layer: nn.Module) -> bool:
    """Whether this is a normalization layer whose weights are all frozen: its statistics are frozen too."""
    own = list(layer.parameters(recurse=False))
    return isinstance(layer, Norm) and bool(own) and not any(p.requires_grad for p in own)


def draws(layer: nn.Module) -> bool:
    """Whether the layer draws random numbers in training."""
    match layer:
        case nn.modules.dropout._DropoutNd():
            return bool(layer.p > 0)
        case nn.RNNBase():
            return bool(layer.dropout > 0 and layer.num_layers > 1)
        case nn.MultiheadAttention():
            return bool(layer.dropout > 0)
    return isinstance(layer, nn.RReLU | nn.FractionalMaxPool2d | nn.FractionalMaxPool3d)


def leave_weights() -> None:
    """Replaces the `flatten_parameters` of recurrent layers, which moves the weights that it is given in memory."""


def check_layers(network: nn.Module) -> None:
    """Refuse layers that cannot be federated as they are."""
    for name, layer in network.named_modules():
        where = f"layer '{name}' ({type(layer).__name__})"
        if isinstance(layer, nn.SyncBatchNorm):
            raise CoterieError(f"{where} synchronizes processes that do not exist here; use BatchNorm instead")
        if isinstance(layer, Norm) and layer.track_running_stats and layer.momentum is None:
            raise CoterieError(f"{where} has momentum=None, a cumulative average; give it a momentum such as 0.1")
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in layer.parameters(recurse=False)):
            raise CoterieError(f"{where} has no weights yet; run one batch through the network before you pass it")


def check_forward(network: nn.Module, x: Inputs, expected: tuple[Tensor, Tensor]) -> str:
    """Refuse hidden state and randomness that is not torch's. Returns the layers that draw random numbers, or ''.

    expected: what the network gives for x in evaluation and in training, with seed 0.
    """
    trial = copy.deepcopy(network)
    before = {name: b.clone() for name, b in trial.named_buffers()}
    trial.eval()
    if not all(same(seeded(trial, x, seed=seed), expected[0]) for seed in (1, 2, 3)):
        raise CoterieError(
            "the network draws random numbers in evaluation too, or keeps state between calls; call F.dropout(..., "
            "training=self.training)"
        )
    first = seeded(trial.train(), x, seed=1)
    check_buffers(trial, x, before)
    again = seeded(trial, x, seed=1)
    random = not same(first, expected[1]) or advances(trial, x)
    if not same(first, again) or (random and not same(seeded(trial, x, seed=0), expected[1])):
        raise CoterieError(
            "the network gives another output for the same samples and the same seed: it keeps state between calls, or "
            "draws random numbers that are not torch's; make forward a function of its input"
        )
    if mixes(network, x, training=False):
        raise CoterieError(
            "the network's output for a sample depends on the other samples of its batch, so predictions would change "
            "with the batch; recurrent and attention layers need batch_first=True where samples are (time, features)"
        )
    named = [f"{name} ({type(layer).__name__})" for name, layer in network.named_modules() if draws(layer)]
    if mixes(network, x, training=True):
        named.append("its forward, which mixes the samples of a batch")
    return ", ".join(named) or ("its forward" if random else "")


def mixes(network: nn.Module, x: Inputs, training: bool) -> bool:
    """Whether one of two samples changes the output of the other. BatchNorm, which may, is used as in testing."""
    trial = copy.deepcopy(network).train(training)
    for layer in trial.modules():
        if isinstance(layer, Norm):
            layer.eval()
            if layer.running_mean is None:
                return False  # it uses the statistics of the batch in testing too, and is handled
    plain = seeded(trial, x, seed=0)
    for changed, kept in ((0, 1), (1, 0)):
        other = apply(lambda t, at=changed: with_other_row(t, at), x)
        if not torch.allclose(seeded(trial, other, seed=0)[kept], plain[kept], rtol=1e-3, atol=1e-5, equal_nan=True):
            return True
    return False


def with_other_row(x: Tensor, at: int) -> Tensor:
    """A copy in which one sample has other values."""
    made = x.clone()
    made[at] = -x[at] if x.is_floating_point() else ~x[at] if x.dtype == torch.bool else 1 - x[at]
    return made


def check_buffers(trial: nn.Module, x: Inputs, before: Tree) -> None:
    """Refuse a forward that writes to buffers other than statistics, or replaces these: the update would be lost."""
    layers = dict(trial.named_modules())
    for name, b in trial.named_buffers():
        if name in before and same(b, before[name]):
            continue
        if not is_statistic(name):
            raise CoterieError(
                f"the network's forward writes to its buffer '{name}', which is not a running_mean or running_var of a "
                "normalization layer; clients would share it. Remove the layer (spectral_norm keeps such buffers)"
            )
        if not isinstance(layers[name.rpartition(".")[0]], Norm):
            given = b.clone()
            seeded(trial, x, 0, {name: given})
            if same(given, b):
                raise CoterieError(f"the network replaces its buffer '{name}' in forward; write into it in place")


def seeded(network: nn.Module, x: Inputs, seed: int, weights: Tree | None = None) -> Tensor:
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return forward(network, x, weights)


def advances(network: nn.Module, x: Inputs) -> bool:
    """Whether the network draws from torch's stream, also where outputs for two seeds are equal by chance."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        before = torch.default_generator.manual_seed(1).get_state()
        forward(network, x, None)
        return not torch.equal(before, torch.default_generator.get_state())


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())


def copied(module: nn.Module) -> nn.Module:
    """A copy without what a forward left in attributes (attention maps, features), which belongs to a past step."""
    left = {id(t): None for layer in module.modules() for t in vars(layer).values() if is_intermediate(t)}
    return copy.deepcopy(module, dict(left))


def is_intermediate(value: object) -> bool:
    """Whether it is a result of a computation, with a gradient or inside vmap, and not a constant."""
    return isinstance(value, Tensor) and (
        value.grad_fn is not None or torch._C._functorch.is_functorch_wrapped_tensor(value)
    )


def weights_of(module: nn.Module) -> Tree:
    """The tensors that are trained and sent: parameters that are not frozen, and statistics of layers that are not."""
    named = {n: p.detach().clone() for n, p in module.named_parameters() if p.requires_grad}
    for prefix, layer in module.named_modules():
        if not is_frozen(layer):
            own = layer.named_buffers(prefix, recurse=False)
            named.update({n: b.detach().clone() for n, b in own if is_statistic(n)})
    return named


def frozen_of(module: nn.Module, weights: Tree) -> Tree:
    """Frozen parameters and other buffers, shared by all clients."""
    moving = {n for n, p in module.named_parameters(remove_duplicate=False) if p.requires_grad}
    return {n: t.detach() for n, t in module.state_dict().items() if n not in weights and n not in moving}


def own_copy(network: nn.Module) -> nn.Module:
    """A copy of a user's network, without what only torch's own training needs. Layers that cannot work are refused."""
    check_layers(network)
    try:
        network = copy.deepcopy(network)
    except RuntimeError as error:  # a module holds a tensor with a gradient
        raise CoterieError(f"the model cannot be copied: {error}") from None
    for module in network.modules():
        if isinstance(module, Norm):
            module.num_batches_tracked = None  # used for torch's cumulative average only
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters = leave_weights  # type: ignore[method-assign]
    return network
