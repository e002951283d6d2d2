"""The server keeps k models; each client trains the one that fits its data best, and each is averaged separately.

Yishay Mansour, Mehryar Mohri, Jae Ro, Ananda Theertha Suresh: Three Approaches for Personalization with Applications to
Federated Learning, arXiv 2020 (2002.10619).
The same as IFCA (Ghosh, Chung, Yin, Ramchandran, NeurIPS 2020) with model averaging.
The first model is the common start, the others are initialized independently: equal models would stay one cluster.
A client chooses the model with the lowest mean loss on its training samples, without augmentation: when it joins,
before every training, and after the last round. The last choice, among the final models, is the one reported
(`finished`). In between (`pre`), a client keeps its latest choice. Momentum that is kept belongs to the client,
whichever model it trains.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.core import tree
from coterie.core.batch import Data, each, sample_losses
from coterie.core.init import networks
from coterie.core.method import Census, Method
from coterie.core.model import Model, Weights
from coterie.core.protections import Protections, refused, robust
from coterie.core.ranges import Index, Samples
from coterie.core.tree import Tree


class Server(NamedTuple):
    models: Weights  # (k, ...)


class State(NamedTuple):
    cluster: Tensor  # () j*, the last choice
    momentum: Tree


class Down(NamedTuple):
    models: Weights  # (k, ...)
    weights: Weights | tuple[()] = ()  # never sent; holds the trained model when that is tested


class Up(NamedTuple):
    cluster: Annotated[Tensor, Index("clusters")]  # () j*
    weights: Weights
    samples: Samples  # () n_i


@dataclass(frozen=True)
class HypCluster(Method[Server, State, Down, Up]):
    clusters: int = field(default=5, metadata={"help": "models that the server keeps (k)", "low": 1})

    title: ClassVar[str] = "HypCluster"
    formula: ClassVar[str] = """
        j_i = argmin over j of f_i(w_j)
        w_j ← Σ_i n_i SGD(f_i; w_j) / Σ_i n_i over clients with j_i = j
    """
    family: ClassVar[str] = "clusters"
    suits: ClassVar[tuple[str, ...]] = ("feature shift", "new clients")
    results: ClassVar[dict[str, str]] = {"HypCluster": "finished"}
    protections: ClassVar[Protections] = {
        **robust(
            refused("its clients train different models, so a large distance to the others does not indicate a fault")
        ),
        "dp-client": refused("its server averages clients that chose the same model, and that choice gets no noise"),
        "dp-sample": refused("clients send which model fits their samples best, without noise"),
    }

    def server_init(self, model: Model, census: Census) -> Server:
        return Server(networks(model, self.clusters))

    def server_welcome(self, server: Server) -> Tree:
        return tree.flatten(server.models)

    def server_send(self, server: Server, client: Tensor) -> Down:
        return Down(server.models)

    def client_init(self, model: Model, data: Data, welcome: Tree) -> State:
        models = tree.fill(model.start, welcome)  # (k, ...)
        return State(self.choice(model, models, data), self.train.start(model.start))

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
        cluster = self.choice(model, down.models, data)
        weights, momentum = self.train(
            tree.pick(down.models, cluster.long()),
            lambda w, batch: model.loss(model(w, batch.x), batch),
            data,
            state.momentum,
        )
        return State(cluster, momentum), Up(cluster, weights, data.samples)

    def choice(self, model: Model, models: Weights, data: Data) -> Tensor:
        """() j*: the model with the smallest mean loss on the client's training samples."""
        losses = each(lambda w: data.mean(sample_losses(model, w, data)), (models,), data)  # (k,)
        return losses.argmin().to(torch.int32)

    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        member = F.one_hot(ups.cluster.long(), self.clusters).double()  # (S, k)
        mass = (member * ups.samples.double()[:, None]).T  # (k, S)
        total = mass.sum(1)  # (k,)
        means = tree.mix(ups.weights, mass / total.clamp_min(1)[:, None])  # (k, ...)

        def renew(mean: Tensor, old: Tensor) -> Tensor:
            return torch.where(total.view(-1, *[1] * (old.ndim - 1)) > 0, mean, old)

        return Server(tree.apply(renew, means, server.models))

    def client_finish(self, model: Model, state: State, down: Down, data: Data) -> State:
        return state._replace(cluster=self.choice(model, down.models, data))

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        return model(down.weights or tree.pick(down.models, state.cluster.long()), x)
