"""Split a network into an encoder and a head.

The head is, in this order: the module that the user names; the network's own `encoder` and `head`; a module of the
network with a common name for a head; the end of an nn.Sequential; the module with parameters that runs last, or a
module that contains it. Whatever is found is verified: on random samples head(encoder(x)) must equal network(x), also
after all parameters have moved.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from coterie.core.errors import CoterieError, some_of
from coterie.core.forward import forward
from coterie.core.packing import Inputs

NAMES = (
    "head",
    "heads",
    "classifier",
    "fc",
    "output",
    "out",
    "logits",
    "last_linear",
    "score",
)  # common names of heads
LISTED = 30  # modules that a message names, at most


class NoHead(CoterieError):
    """No module of the network is a head."""


class Joined(nn.Module):
    """head(encoder(x))."""

    def __init__(self, encoder: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = encoder, head

    def forward(self, x: Inputs, /) -> Tensor:
        return forward(self.head, forward(self.encoder, x))


class NetworkSplit(NamedTuple):
    encoder: nn.Module
    head: nn.Module
    name: str  # of the head in the network


def split_head(network: nn.Module, x: Inputs, expected: tuple[Tensor, Tensor], head: str | None = None) -> NetworkSplit:
    """Encoder and head of a copy of the network. x: (B, ...) its input; expected: its `outputs`; head: a name."""
    found = [named(network, head)] if head is not None else candidates(network, x, expected)
    moved = outputs(shaken(network), x)
    spare = None  # a head that is given more than a vector for each sample: the last layer inside it may fit
    for parts in found:
        if not any(True for _ in parts.head.parameters()):
            if head is not None:
                raise CoterieError(f"'{head}' cannot be the head, it has no parameters; {choice(network)}")
            continue
        if fits(parts, x, expected) and fits(shaken_parts(parts), x, moved):
            check_ties(parts)
            if head is not None or is_vector(parts.encoder, x):
                return parts
            spare = spare or parts
    if spare:
        return spare
    if head is not None:
        raise CoterieError(
            f"'{head}' cannot be the head: it is not the last module that runs, head(encoder(x)) differs from "
            f"network(x); {choice(network)}"
        )
    if not any(True for _ in network.children()):
        raise CoterieError("the model is a single layer, without an encoder; pass nn.Sequential(nn.Flatten(), layer)")
    raise NoHead(
        f"no head was found: no module with parameters runs last, so that head(encoder(x)) equals network(x); name the "
        f"head with head=... or --head, or wrap the network in nn.Sequential(encoder, head). {choice(network)}"
    )


def feature_axis(head: nn.Module, z: Tensor, class_axis: int | None) -> int:
    """The axis of features z (B, ...) along which the head's first layer reads vectors; 0: unknown.

    class_axis: of the outputs of the task, for a head without layers that tell.
    """
    if z.ndim == 2:
        return 1
    first = next((layer for layer in head.modules() if isinstance(layer, nn.Linear | _ConvNd)), None)
    if isinstance(first, nn.Linear):
        return z.ndim - 1 if z.shape[-1] == first.in_features else 0
    if first is not None:
        return 1 if z.shape[1] == first.in_channels else 0
    return class_axis if class_axis is not None and class_axis < z.ndim else 0


def candidates(network: nn.Module, x: Inputs, expected: tuple[Tensor, Tensor]) -> Iterator[NetworkSplit]:
    copied = copy.deepcopy(network)
    children = {n: m for n, m in copied._modules.items() if m is not None}  # one that is used twice, twice
    if {"encoder", "head"} == set(children):
        yield NetworkSplit(children["encoder"], children["head"], "head")
    for name in NAMES:
        if name in children and has_parameters(children[name]):
            yield named(network, name)
    if isinstance(network, nn.Sequential) and type(network).forward is nn.Sequential.forward:
        yield from chain_end(children)
    name = last_to_run(network, x)
    while name:
        parts = named(network, name)
        yield parts
        if fits(parts, x, expected) or not has_parameters(parts.encoder):
            return
        name = name.rpartition(".")[0]  # an adapter is a part of the layer that it adapts


def chain_end(chain: dict[str, nn.Module]) -> Iterator[NetworkSplit]:
    """The last layer with parameters, and the layers without parameters after it."""
    layers = list(chain.items())
    places = [at for at, (_, layer) in enumerate(layers) if has_parameters(layer)]
    if not places or places[-1] == 0:
        return
    at = places[-1]
    below, top = OrderedDict(layers[:at]), OrderedDict(layers[at:])
    name, layer = layers[at]
    yield NetworkSplit(nn.Sequential(below), layer if len(top) == 1 else nn.Sequential(top), name)


def named(network: nn.Module, name: str) -> NetworkSplit:
    """The network without this module, and the module. A unique end of its name will do, as for a wrapped network."""
    network = copy.deepcopy(network)
    paths = [path for path, _ in network.named_modules(remove_duplicate=False)]
    full = [name] if name in paths else [path for path in paths if path.endswith(f".{name}")]
    if len(full) != 1:
        several = f"; these end in it: {', '.join(full)}" if full else ""
        raise CoterieError(f"the network has no module '{name}' to be its head{several}; {choice(network)}")
    found = network.get_submodule(full[0])
    owner, _, last = full[0].rpartition(".")
    setattr(network.get_submodule(owner), last, nn.Identity())
    return NetworkSplit(network, found, full[0])


def last_to_run(network: nn.Module, x: Inputs) -> str:
    """Name of the module with parameters that runs last and has no others inside; empty: none."""
    trial, ran = copy.deepcopy(network).eval(), list[str]()
    for name, module in trial.named_modules():
        if name and has_parameters(module) and not any(map(has_parameters, module.children())):
            module.register_forward_hook(lambda *_, name=name: ran.append(name))
    with torch.no_grad():
        forward(trial, x)
    return ran[-1] if ran else ""


def fits(parts: NetworkSplit, x: Inputs, expected: tuple[Tensor, Tensor]) -> bool:
    """Whether head(encoder(x)) equals the network's output, in evaluation and in training."""
    try:
        return all(map(equal, outputs(Joined(parts.encoder, parts.head), x), expected))
    except Exception:  # a network without its head may fail in any way
        return False


def is_vector(encoder: nn.Module, x: Inputs) -> bool:
    """Whether the head is given a vector for each sample."""
    return outputs(encoder, x)[0].ndim == 2


def shaken(module: nn.Module) -> nn.Module:
    """A copy with every parameter moved: a scale that starts at 1 or an adapter that starts at 0 takes effect."""
    copied = copy.deepcopy(module)
    with torch.no_grad():
        for p in copied.parameters():
            if p.is_floating_point():
                p.add_(torch.arange(p.numel(), device=p.device).cos().view(p.shape).to(p.dtype), alpha=0.05)
    return copied


def shaken_parts(parts: NetworkSplit) -> NetworkSplit:
    both = nn.ModuleList([parts.encoder, parts.head])  # together, so that tied weights stay tied
    encoder, head = shaken(both).children()
    return NetworkSplit(encoder, head, parts.name)


def equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True)


def outputs(network: nn.Module, x: Inputs) -> tuple[Tensor, Tensor]:
    """Outputs of a copy in evaluation and in training mode, with the same random numbers for dropout each time."""
    trial = copy.deepcopy(network)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        tested = forward(trial.eval(), x)
        torch.default_generator.manual_seed(0)
        return tested, forward(trial.train(), x)


def check_ties(parts: NetworkSplit) -> None:
    below = {id(p): name for name, p in parts.encoder.named_parameters() if p.requires_grad}
    for name, p in parts.head.named_parameters():
        if id(p) in below:
            raise CoterieError(
                f"the head's '{name}' and the encoder's '{below[id(p)]}' are one parameter; tied weights cannot be "
                "trained here, since encoder and head travel separately: untie or freeze them"
            )


def has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def choice(network: nn.Module) -> str:
    """The modules that can be a head, as text for a message."""
    names = [name for name, module in network.named_modules() if name and has_parameters(module)]
    return f"modules with parameters: {some_of(names, LISTED) or 'none'}"
