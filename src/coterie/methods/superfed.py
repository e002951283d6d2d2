"""Clients train all mixtures of a shared and a personal model at once, so that every mixture is accurate.

Seok-Ju Hahn, Minwoo Jeong, Junghye Lee: Connecting Low-Loss Subspace for Personalized Federated Learning, KDD 2022.
The paper begins with mixtures after 40 % of all rounds; a method does not know how many there are, so `begin` counts
rounds and is set for 100 of them (the authors' code: 20 % by default, 40 % in its examples). The paper searches each
client's best mixture on test samples; here the mixture is a setting (`predict_share`). The personal models of all
clients begin with the same weights, which differ from those of the shared model. The proximal term is that of FedProx,
μ/2 times the squared distance; the authors' code adds μ times the distances of all tensors, not squared. BatchNorm's
statistics are those of the mixtures, kept with the shared model. μ and ν are defaults of the authors' code, whose
examples also use ν = 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from coterie.core import random, tree
from coterie.core.batch import Batch, Data
from coterie.core.init import redrawn
from coterie.core.losses import inner_product, squared_distance
from coterie.core.method import Census, Method
from coterie.core.model import Model, Weights
from coterie.core.protections import ALLOWED, Protections
from coterie.core.ranges import Samples
from coterie.core.steps import fold
from coterie.core.tree import Tree


class Modes(NamedTuple):
    shared: Weights  # w_f
    personal: Weights  # w_l


class Server(NamedTuple):
    weights: Weights
    personal: Weights  # that personal models begin with
    round: Tensor  # () number of completed rounds


class State(NamedTuple):
    weights: Weights  # w_l
    begun: Tensor  # () 1: it is trained
    momentum: Tree


class Down(NamedTuple):
    shared: Weights  # w_g
    mixing: Tensor  # () 1: train mixtures; 0: the shared model only


class Up(NamedTuple):
    shared: Weights
    samples: Samples  # () n_i


@dataclass(frozen=True)
class SuPerFed(Method[Server, State, Down, Up]):
    begin: int = field(default=40, metadata={"help": "rounds before mixtures are trained (L)", "low": 0})
    by_layer: bool = field(
        default=False, metadata={"help": "draw a mixture for every layer (SuPerFed-LM), not for the whole model"}
    )
    pull: float = field(
        default=0.01, metadata={"help": "pull of the shared model towards the received one (μ)", "low": 0}
    )
    apart: float = field(default=2.0, metadata={"help": "push of both models to be orthogonal (ν)", "low": 0})
    predict_share: float = field(
        default=0.5, metadata={"help": "share of the personal model in predictions (λ)", "low": 0, "high": 1}
    )

    title: ClassVar[str] = "SuPerFed"
    formula: ClassVar[str] = """
        f_i((1 - λ) w' + λ v_i) + μ/2 |w' - w|² + ν cos²(w', v_i) trains w' and v_i,  λ ~ U(0, 1) in every step
        w ← Σ_i p_i w' of client i
    """
    family: ClassVar[str] = "mixture"
    results: ClassVar[dict[str, str]] = {"SuPerFed": "post"}
    protections: ClassVar[Protections] = {"dp-client": ALLOWED, "dp-sample": ALLOWED}

    def server_init(self, model: Model, census: Census) -> Server:
        return Server(model.start, redrawn(model, 1), model.mean.new_zeros(()))

    def server_welcome(self, server: Server) -> Tree:
        return tree.flatten(server.personal)

    def server_send(self, server: Server, client: Tensor) -> Down:
        return Down(server.weights, (server.round >= self.begin).to(server.round.dtype))

    def client_init(self, model: Model, data: Data, welcome: Tree) -> State:
        start = tree.fill(model.start, welcome)
        return State(start, model.mean.new_zeros(()), self.train.start(Modes(model.start, start)))

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
        def step(carry: tuple[Modes, Tree], batch: Batch) -> tuple[Modes, Tree]:
            shares = self.drawn(carry[0].shared, batch)  # λ, for every tensor

            def loss(pair: Modes, batch: Batch) -> Tensor:
                mixed = mixture(pair.shared, pair.personal, {n: down.mixing * share for n, share in shares.items()})
                task = model.loss(model(mixed, batch.x), batch)
                prox = self.pull / 2 * squared_distance(pair.shared, down.shared)
                return task + prox + down.mixing * self.apart * cosine(*pair).square()

            return self.train.step(carry[0], loss, batch, data.rate, carry[1])

        runs = (
            replace(run, drawn=run.drawn._replace(key=random.derive(data.key, random.DRAW, epoch)))
            for epoch, run in enumerate(self.train.runs(data))
        )
        begun = (Modes(down.shared, state.weights), state.momentum)
        pair, momentum = fold(begun, ((step, run) for run in runs))
        personal = tree.where(down.mixing > 0, pair.personal, state.weights)
        after = State(personal, torch.maximum(state.begun, down.mixing), momentum if self.train.keep_momentum else {})
        return after, Up(pair.shared, data.samples)

    def drawn(self, weights: Weights, batch: Batch) -> Tree:
        """Name of a tensor -> () share of the personal model in it, uniform in [0, 1); one draw, or one per layer."""
        assert batch.key is not None
        key, layers = random.derive(batch.key, batch.sample[0]), dict[str, int]()
        shares = {}
        for name, t in tree.items(weights):
            number = layers.setdefault(name.rpartition(".")[0], len(layers)) if self.by_layer else 0
            shares[name] = random.uniform(random.derive(key, number)).to(t.dtype)
        return shares

    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        return Server(tree.average(ups.shared, ups.samples), server.personal, server.round + 1)

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        return model(tree.blend(down.shared, state.weights, 1 - self.predict_share * state.begun), x)

    def server_predict(self, model: Model, server: Server, x: Tensor) -> Tensor:
        return model(server.weights, x)


def mixture(shared: Weights, personal: Weights, shares: Tree) -> Weights:
    """(1 - λ) w_f + λ w_l, with BatchNorm's statistics of the shared model."""
    there = tree.flatten(personal)
    mixed = {n: t if tree.is_statistic(n) else t.lerp(there[n], shares[n]) for n, t in tree.items(shared)}
    return tree.fill(shared, mixed, leaf=None)


def cosine(a: Weights, b: Weights) -> Tensor:
    """() between all trained weights of two models; 0 if one of them is zero."""
    return inner_product(a, b) / (inner_product(a, a) * inner_product(b, b)).clamp_min(1e-24).sqrt()
