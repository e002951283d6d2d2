"""Each client has its own mean of all clients' models, with weights for every layer that a hypernetwork learns.

Xiaosong Ma, Jie Zhang, Song Guo, Wenchao Xu: Layer-wised Model Aggregation for Personalized Federated Learning,
CVPR 2022.
Every client has an embedding and a hypernetwork on the server: a dense layer and, for every layer of the network, one
output with a softmax over all clients. After a round, embedding and hypernetwork take one step along the change of the
client's model, from the mean that it was sent. A layer is a module with parameters; BatchNorm's statistics are averaged
with the weights of their layer. The sizes of the hypernetwork, its learning rate and initial weights are ours: outputs
begin with zeros and a bias `own` for the client itself, so that every client begins near its own model. Clients that
have not taken part yet stand in the means with the initial model.
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
from coterie.core.protections import ALLOWED, HANDED_ON, OWN_ROWS, Protections, refused
from coterie.core.tree import Tree


class LayerHyperNetwork(NamedTuple):
    """Of one client, or with a leading axis of all m."""

    embedding: Tensor  # (e,) v_i
    hidden: Tensor  # (u, e)
    hidden_bias: Tensor  # (u,)
    out: Tensor  # (L, m, u) one output for each of the L layers
    out_bias: Tensor  # (L, m)


class Server(NamedTuple):
    models: Weights  # (m, ...) of all clients, as last uploaded
    hyper: LayerHyperNetwork  # (m, ...)


class State(NamedTuple):
    momentum: Tree


class Down(NamedTuple):
    weights: Weights


class Up(NamedTuple):
    weights: Weights


@dataclass(frozen=True)
class pFedLA(Method[Server, State, Down, Up]):
    embedding_size: int = field(default=100, metadata={"help": "length of a client's embedding", "low": 1})
    hidden_units: int = field(default=100, metadata={"help": "units of the hypernetworks' hidden layer", "low": 1})
    server_lr: float = field(default=0.01, metadata={"help": "learning rate of the hypernetworks", "low": 0})
    own: float = field(default=1.0, metadata={"help": "initial logit of a client's own model in its means", "low": 0})

    title: ClassVar[str] = "pFedLA"
    formula: ClassVar[str] = """
        w̄_i = Σ_j α_ij w_j in every layer,  α_i = softmax of h_i(v_i)
        w_i = SGD(f_i; w̄_i)
        (h_i, v_i) ← (h_i, v_i) + η (∂w̄_i / ∂(h_i, v_i))ᵀ (w_i - w̄_i)
    """
    family: ClassVar[str] = "hypernetwork"
    suits: ClassVar[tuple[str, ...]] = ("few clients",)
    results: ClassVar[dict[str, str]] = {"pFedLA": "post"}
    protections: ClassVar[Protections] = {
        "robust-median": refused(OWN_ROWS),
        "dp-client": refused(f"{HANDED_ON}, in means whose weights are learned from single updates"),
        "dp-sample": ALLOWED,
    }

    def server_init(self, model: Model, census: Census) -> Server:
        m, e, u, like = len(census.samples), self.embedding_size, self.hidden_units, model.mean
        draw, layers = generator(model), len(set(layers_of(model.start).values()))
        embedding = normal(draw, (m, e), like)
        hidden, bias = (t.expand(m, *t.shape).clone() for t in linear(draw, e, (u,), like))
        own = self.own * torch.eye(m, dtype=like.dtype, device=like.device)
        outputs = like.new_zeros(m, layers, m, u), own[:, None].repeat(1, layers, 1)
        models = tree.apply(lambda t: t.expand(m, *t.shape).clone(), model.start)
        return Server(models, LayerHyperNetwork(embedding, hidden, bias, *outputs))

    def server_send(self, server: Server, client: Tensor) -> Down:
        mine = tree.apply(lambda t: t.index_select(0, client[None])[0], server.hyper)
        return Down(mixed(server.models, shares(mine)))

    def server_greet(self, server: Server) -> Down:
        """A newcomer has no hypernetwork: it gets the mean of all models."""
        return Down(tree.apply(lambda t: t.mean(0), server.models))

    def client_init(self, model: Model, data: Data, welcome: Tree) -> State:
        return State(self.train.start(model.start))

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
        weights, momentum = self.train(
            down.weights, lambda w, batch: model.loss(model(w, batch.x), batch), data, state.momentum
        )
        return State(momentum), Up(weights)

    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        hyper = tree.pick(server.hyper, clients)
        moved = [
            self.descend(server.models, tree.pick(hyper, row), tree.pick(ups.weights, row))
            for row in range(len(clients))
        ]
        return Server(tree.put(server.models, clients, ups.weights), tree.put(server.hyper, clients, tree.stack(moved)))

    def descend(self, models: Weights, mine: LayerHyperNetwork, trained: Weights) -> LayerHyperNetwork:
        """One step of a client's embedding and hypernetwork: η (∂θ̄_i / ∂(v_i, φ_i))^T Δθ_i, where Δθ_i = θ_i - θ̄_i."""
        sent, pull, *_ = torch.func.vjp(lambda hyper: tree.trained(mixed(models, shares(hyper))), mine)
        after = tree.trained(trained)
        (slope,) = pull({name: t - after[name] for name, t in sent.items()})
        moved: LayerHyperNetwork = tree.apply(lambda w, g: w - self.server_lr * g, mine, slope)
        return moved

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        return model(down.weights, x)

    def server_report(self, server: Server) -> Tree:
        return {"shares": torch.func.vmap(shares)(server.hyper)}  # (m, L, m)


def shares(mine: LayerHyperNetwork) -> Tensor:
    """(L, m) α_i: the weight of every client's model in each layer of this client's."""
    hidden = (mine.hidden @ mine.embedding + mine.hidden_bias).relu()
    return (mine.out @ hidden + mine.out_bias).softmax(1)


def mixed(models: Weights, weights: Tensor) -> Weights:
    """The models (m, ...), each layer averaged with its row of weights (L, m)."""
    layers = layers_of(models)
    made = {name: torch.tensordot(weights[layers[name]], t, dims=1) for name, t in tree.items(models)}
    return tree.fill(models, made)


def layers_of(weights: Weights) -> dict[str, int]:
    """Name of a tensor -> number of its layer, the module that it belongs to."""
    numbers: dict[str, int] = {}
    return {name: numbers.setdefault(name.rpartition(".")[0], len(numbers)) for name, _ in tree.items(weights)}
