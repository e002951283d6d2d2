"""The personal model is a weighted average of a local model and the shared one; both are trained together.

Yuyang Deng, Mohammad Mahdi Kamani, Mehrdad Mahdavi: Adaptive Personalized Federated Learning, arXiv 2020 (2003.13461).
The weight of the local model is fixed, as in FedPAC's comparison; `adaptive` learns it, as in the paper.
The gradient of the local model is taken at the shared model after its step on the same batch, as in the authors' code
(FedTorch); Algorithm 1 of the paper takes both gradients before either step.
The local model keeps the BatchNorm statistics of the mixture, because it only runs as part of the mixture.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from torch import Tensor

from coterie.core.batch import Batch, Data
from coterie.core.method import Census, Method
from coterie.core.model import Model, Weights
from coterie.core.protections import ALLOWED, Protections
from coterie.core.ranges import Samples
from coterie.core.steps import fold
from coterie.core.tree import Tree, average, blend


class Server(NamedTuple):
    weights: Weights


class State(NamedTuple):
    weights: Weights  # v_i, the local model
    share: Tensor  # () α_i, weight of the local model in the mixture
    momentum: Tree
    shared_momentum: Tree


class Down(NamedTuple):
    weights: Weights


class Up(NamedTuple):
    weights: Weights  # the shared model as trained
    samples: Samples  # () n_i


class Own(NamedTuple):
    """The local model and its weight in the mixture."""

    weights: Weights
    share: Tensor


class Both(NamedTuple):
    """The shared and the local model during training."""

    shared: Weights
    own: Own
    shared_momentum: Tree
    momentum: Tree


@dataclass(frozen=True)
class APFL(Method[Server, State, Down, Up]):
    share: float = field(
        default=0.25,
        metadata={
            "help": "weight of the local model in the mixture (α); if adaptive, the initial one",
            "low": 0,
            "high": 1,
        },
    )
    adaptive: bool = field(default=False, metadata={"help": "learn that weight"})

    title: ClassVar[str] = "APFL"
    formula: ClassVar[str] = """
        w_i ← w_i - η ∇f_i(w_i)
        v_i ← v_i - η ∇_v f_i(α v_i + (1 - α) w_i)
        w ← Σ_i p_i w_i,  personal model: α v_i + (1 - α) w
    """
    family: ClassVar[str] = "mixture"
    results: ClassVar[dict[str, str]] = {"APFL": "post"}
    protections: ClassVar[Protections] = {"dp-client": ALLOWED, "dp-sample": ALLOWED}

    def server_init(self, model: Model, census: Census) -> Server:
        return Server(model.start)

    def server_send(self, server: Server, client: Tensor) -> Down:
        return Down(server.weights)

    def client_init(self, model: Model, data: Data, welcome: Tree) -> State:
        momentum = self.train.start(model.start)
        return State(model.start, model.mean.new_full((), self.share), momentum, momentum)

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
        def loss(w: Weights, batch: Batch) -> Tensor:
            return model.loss(model(w, batch.x), batch)

        def own_step(own: Own, shared: Weights, batch: Batch, momentum: Tree) -> tuple[Own, Tree]:
            def mixture_loss(own: Own, batch: Batch) -> Tensor:
                return loss(blend(own.weights, shared, own.share), batch)

            weights, momentum = self.train.step(
                own.weights, lambda v, batch: mixture_loss(Own(v, own.share), batch), batch, data.rate, momentum
            )
            if not self.adaptive:
                return Own(weights, own.share), momentum
            moved, _ = plain.step(own, mixture_loss, batch, data.rate, {})  # α - η <v - w, ∇f(mixture)>
            return Own(weights, moved.share.clamp(0, 1)), momentum

        plain = self.train.plain()

        def both(models: Both, batch: Batch) -> Both:
            shared, shared_momentum = self.train.step(models.shared, loss, batch, data.rate, models.shared_momentum)
            own, momentum = own_step(models.own, shared, batch, models.momentum)
            return Both(shared, own, shared_momentum, momentum)

        before = Both(down.weights, Own(state.weights, state.share), state.shared_momentum, state.momentum)
        shared, own, shared_momentum, momentum = fold(before, ((both, run) for run in self.train.runs(data)))
        if not self.train.keep_momentum:
            momentum, shared_momentum = {}, {}
        return State(*own, momentum, shared_momentum), Up(shared, data.samples)

    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        return Server(average(ups.weights, ups.samples))

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        return model(blend(state.weights, down.weights, state.share), x)

    def server_predict(self, model: Model, server: Server, x: Tensor) -> Tensor:
        return model(server.weights, x)
