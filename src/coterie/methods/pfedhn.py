"""A hypernetwork on the server generates each client's model from a learned embedding of the client.

Aviv Shamsian, Aviv Navon, Ethan Fetaya, Gal Chechik: Personalized Federated Learning using Hypernetworks, ICML 2021.
The authors train one client per round. Here the server sends all participants their models first, and then takes one
step for each in turn, from the model it would generate now towards the one that the client trained. (Steps from the
models that were sent would add up: twenty clients push twenty times as far as one, and training diverges.)
So clients send the trained model, not Δ_i. A step changes the embedding of its client only (the weight decay of the
authors also shrinks all others). BatchNorm's running statistics are averaged, not generated.
We assume that FedPAC's comparison (ICLR 2023) tests models after local training; the authors test them as generated
(`pre`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from coterie.core import tree
from coterie.core.batch import Data
from coterie.core.init import generator, linear, normal
from coterie.core.method import Census, Method
from coterie.core.model import Model, Weights
from coterie.core.protections import ALLOWED, OWN_ROWS, Protections, refused
from coterie.core.training import LocalTraining
from coterie.core.tree import Tree


class HyperNetwork(NamedTuple):
    layers: Tree  # of the MLP: embedding -> (h,)
    basis: Weights  # (h, ...) the weights of the last layer, for each tensor
    bias: Weights  # and its biases
    embedding: Tensor  # (e,) of a client, or (m, e) of all


class Server(NamedTuple):
    hyper: HyperNetwork  # φ and all v_i
    speed: HyperNetwork  # momentum
    statistics: Weights  # BatchNorm's
    samples: Tensor  # (m,) n_i


class State(NamedTuple):
    momentum: Tree


class Down(NamedTuple):
    weights: Weights  # θ_i


class Up(NamedTuple):
    weights: Weights  # θ~_i


@dataclass(frozen=True)
class pFedHN(Method[Server, State, Down, Up]):
    embedding_size: int | None = field(
        default=None, metadata={"help": "length of an embedding; default: 1 + m/4", "low": 1}
    )
    hidden_units: int = field(default=100, metadata={"help": "units of the hypernetwork's hidden layers", "low": 1})
    hidden_layers: int = field(
        default=3, metadata={"help": "hidden layers of the hypernetwork after the first", "low": 0}
    )
    hyper_seed: int = field(
        default=0, metadata={"help": "seed of the hypernetwork's initial weights", "low": 0, "below": 1 << 63}
    )
    server_lr: float = field(default=0.01, metadata={"help": "learning rate of the hypernetwork (α)", "low": 0})
    server_momentum: float = field(default=0.9, metadata={"help": "momentum of the hypernetwork", "low": 0})
    server_decay: float = field(default=1e-3, metadata={"help": "weight decay of the hypernetwork", "low": 0})
    client_momentum: float = field(default=0.9, metadata={"help": "momentum of local training", "low": 0})
    client_decay: float = field(default=5e-5, metadata={"help": "weight decay of local training", "low": 0})
    largest_norm: float = field(
        default=50.0, metadata={"help": "largest norm of a gradient, on clients and server", "above": 0}
    )

    title: ClassVar[str] = "pFedHN"
    formula: ClassVar[str] = """
        θ_i = h(v_i; φ),  Δ_i = θ_i - SGD(f_i; θ_i)
        (φ, v_i) ← (φ, v_i) - η (∂θ_i / ∂(φ, v_i))ᵀ Δ_i
    """
    family: ClassVar[str] = "hypernetwork"
    results: ClassVar[dict[str, str]] = {"pFedHN": "post"}
    needs_sgd: ClassVar[str] = "it sets momentum and weight decay of local training itself"
    protections: ClassVar[Protections] = {
        "robust-median": refused(OWN_ROWS),
        "dp-client": refused(
            "its server learns each client's embedding from the update of this client, not from a mean"
        ),
        "dp-sample": ALLOWED,
    }

    @property
    def local(self) -> LocalTraining:
        return self.train.but(
            momentum=self.client_momentum, weight_decay=self.client_decay, clip_gradient=self.largest_norm
        )

    def server_init(self, model: Model, census: Census) -> Server:
        draw, like, clients = generator(model, self.hyper_seed), model.mean, len(census.samples)
        size = int(1 + clients / 4) if self.embedding_size is None else self.embedding_size
        embeddings, layers = normal(draw, (clients, size), like), {}
        for number in range(1 + self.hidden_layers):
            layers[f"{number}.weight"], layers[f"{number}.bias"] = linear(draw, size, (self.hidden_units,), like)
            size = self.hidden_units
        made, statistics = split(model.start)
        basis, bias = {}, {}
        for name, t in tree.items(made):
            weight, bias[name] = linear(draw, size, tuple(t.shape), like)
            basis[name] = weight.movedim(-1, 0).contiguous()
        hyper = HyperNetwork(layers, tree.fill(made, basis), tree.fill(made, bias), embeddings)
        samples = like.new_tensor(census.samples.tolist())
        return Server(hyper, tree.apply(torch.zeros_like, hyper), statistics, samples)

    def server_send(self, server: Server, client: Tensor) -> Down:
        return Down(self.make(of(server.hyper, client), server.statistics))

    def server_greet(self, server: Server) -> Down:
        mean = server.hyper._replace(embedding=server.hyper.embedding.mean(0))
        return Down(self.make(mean, server.statistics))

    def make(self, hyper: HyperNetwork, statistics: Weights | None = None) -> Weights:
        """θ_i = h(v_i; φ)."""
        h = hyper.embedding
        for number in range(1 + self.hidden_layers):
            h = hyper.layers[f"{number}.weight"] @ (h.relu() if number else h) + hyper.layers[f"{number}.bias"]
        made = tree.apply(torch.add, tree.mix(hyper.basis, h), hyper.bias)
        return Weights(*(a | b for a, b in zip(made, statistics or ({}, {}), strict=True)))

    def client_init(self, model: Model, data: Data, welcome: Tree) -> State:
        return State(self.local.start(model.start))

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
        weights, momentum = self.local(
            down.weights, lambda w, batch: model.loss(model(w, batch.x), batch), data, state.momentum
        )
        return State(momentum), Up(weights)

    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        trained, statistics = split(ups.weights)
        hyper, speed = server.hyper, server.speed
        for row, client in enumerate(clients):
            mine, rolling = self.descend(of(hyper, client), of(speed, client), tree.pick(trained, row))
            hyper, speed = back(hyper, client, mine), back(speed, client, rolling)
        return Server(hyper, speed, tree.average(statistics, server.samples[clients]), server.samples)

    def descend(self, hyper: HyperNetwork, speed: HyperNetwork, trained: Weights) -> tuple[HyperNetwork, HyperNetwork]:
        """One SGD step for one client, with Δ_i as the gradient in θ_i."""
        made, pull, *_ = torch.func.vjp(self.make, hyper)
        (slope,) = pull(tree.apply(torch.sub, made, trained))  # (∂θ_i / ∂(φ, v_i))^T Δ_i
        norm = torch.stack([g.norm() for g in tree.leaves(slope)]).norm()
        shrink = (self.largest_norm / (norm + 1e-6)).clamp_max(1)

        def rolling(v: Tensor, g: Tensor, w: Tensor) -> Tensor:  # in place: h P numbers
            return (self.server_momentum * v).addcmul_(g, shrink).add_(w, alpha=self.server_decay)

        speed = tree.apply(rolling, speed, slope, hyper)
        return tree.apply(lambda w, v: torch.sub(w, v, alpha=self.server_lr), hyper, speed), speed

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        return model(down.weights, x)


def of(hyper: HyperNetwork, client: Tensor) -> HyperNetwork:
    return hyper._replace(embedding=hyper.embedding[client[None]][0])  # indexing by a scalar tensor would synchronize


def back(everyone: HyperNetwork, client: Tensor, mine: HyperNetwork) -> HyperNetwork:
    return mine._replace(embedding=tree.put(everyone.embedding, client[None], mine.embedding[None]))


def split(weights: Weights) -> tuple[Weights, Weights]:
    """The generated parameters, and BatchNorm's statistics."""
    made = ({n: t for n, t in part.items() if not tree.is_statistic(n)} for part in weights)
    rest = ({n: t for n, t in part.items() if tree.is_statistic(n)} for part in weights)
    return Weights(*made), Weights(*rest)
