"""A personal model as a module of plain torch, without what it does not need.

With most methods a client's model is one network in the end, however it came about: blended, picked, made by another
network. Then its weights are those of that network, under its own names. Else (several heads, a mixture, a datastore)
the module holds every tensor that its prediction depends on.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from coterie.core import tree
from coterie.core.errors import CoterieError
from coterie.core.model import Model, Weights
from coterie.core.tree import Tree
from coterie.federation.result import PersonalModel


class Whole(nn.Module):
    """A method's own prediction; the tensors that it depends on are buffers."""

    def __init__(self, personal: PersonalModel, needed: set[str] | None = None) -> None:
        super().__init__()
        self.personal = [personal]  # in a list: not a part of this module
        self.form = {"state": personal.state, "down": personal.down}
        self.tensors = tree.flatten(self.form)
        self.needed = [name for name in self.tensors if needed is None or name in needed]
        for name in self.needed:
            self.register_buffer(buffer_name(name), self.tensors[name].detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        filled = tree.fill(self.form, self.tensors | self.held())
        of = self.personal[0]
        return of.method.client_predict(of.model, filled["state"], filled["down"], x)

    def held(self) -> Tree:
        return {name: self.get_buffer(buffer_name(name)) for name in self.needed}


class OneNetwork(nn.Module):
    """Raw samples -> logits of one network with these weights."""

    def __init__(self, model: Model, weights: Weights) -> None:
        super().__init__()
        self.encoder, self.head = copy.deepcopy(model.encoder), copy.deepcopy(model.head)
        self.encoder.load_state_dict(weights.encoder, strict=False)
        self.head.load_state_dict(weights.head, strict=False)
        self.requires_grad_(False).eval()
        self.normalise = model.normalise

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(self.normalise(x)))
        return logits


@dataclass(frozen=True)
class Recorder(Model):
    """Notes which weights it is called with."""

    encoders: list[Tree] = field(default_factory=list)
    heads: list[Tree] = field(default_factory=list)

    def features(self, encoder: Tree, x: Tensor) -> Tensor:
        self.encoders.append(encoder)
        return super().features(encoder, x)

    def logits(self, head: Tree, z: Tensor) -> Tensor:
        self.heads.append(head)
        return super().logits(head, z)


def standalone(personal: PersonalModel, shape: tuple[int, ...], dtype: torch.dtype) -> OneNetwork | Whole:
    """The same function of raw samples (B, *shape), for use by others."""
    x = probe(shape, dtype)
    weights = one_network(personal, x)
    if weights is not None:
        return OneNetwork(personal.model, weights)
    return Whole(personal, used(Whole(personal), x))


def probe(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """(3, *shape) samples that differ in every number."""
    draw = torch.Generator().manual_seed(0)
    if dtype == torch.uint8:
        return torch.randint(0, 256, (3, *shape), generator=draw, dtype=dtype)
    return torch.randn(3, *shape, generator=draw).to(dtype)


def one_network(personal: PersonalModel, x: Tensor) -> Weights | None:
    """Its weights, if the prediction is that of one network."""
    watched = Recorder(**{f.name: getattr(personal.model, f.name) for f in fields(Model)})
    with torch.no_grad():
        logits = personal.method.client_predict(watched, personal.state, personal.down, x)
        if (len(watched.encoders), len(watched.heads)) != (1, 1):
            return None
        found = tree.apply(torch.func.debug_unwrap, Weights(watched.encoders[0], watched.heads[0]))
        if shapes(found) != shapes(personal.model.start):  # many networks, called side by side
            return None
        return found if torch.equal(personal.model(found, x), logits) else None


def shapes(weights: Any) -> dict[str, torch.Size]:
    return {name: t.shape for name, t in tree.items(weights)}


def used(module: Whole, x: Tensor) -> set[str]:
    """Names of the tensors that the prediction depends on."""
    program = exported(module, x)
    buffers = program.graph_signature.inputs_to_buffers
    places = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    read = {buffers[name] for name, node in places.items() if name in buffers and node.users}
    return {name for name in module.needed if buffer_name(name) in read}


def exported(module: nn.Module, x: Tensor) -> torch.export.ExportedProgram:
    """As a graph that takes any number of samples."""
    try:
        with torch.no_grad():
            return torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    except Exception as error:  # a network of the user may fail in any way
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise CoterieError(
            f"torch.export cannot follow this network ({first}); --to safetensors has its weights"
        ) from None


def buffer_name(name: str) -> str:
    """A module's names have no dots."""
    return name.replace(".", "__")
