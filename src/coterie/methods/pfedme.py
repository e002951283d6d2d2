"""A personal model is regularized towards a local copy of the shared model, and the copy follows it.

Canh T. Dinh, Nguyen H. Tran, Tuan Dung Nguyen: Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020.
As in FedPAC's comparison: whole epochs of mini-batches, several steps on each, and only participants train.
SGD runs without momentum; μ is the weight decay. Only the personal model sees data, so the local copy takes its
BatchNorm statistics.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from torch import Tensor

from coterie.core import tree
from coterie.core.batch import Batch, Data
from coterie.core.losses import squared_distance
from coterie.core.method import Census, Method
from coterie.core.model import Model, Weights
from coterie.core.protections import ALLOWED, Protections
from coterie.core.ranges import Samples
from coterie.core.steps import fold
from coterie.core.tree import Tree


class Server(NamedTuple):
    weights: Weights


class State(NamedTuple):
    weights: Weights  # θ_i, the personal model; w_i with use_local


class Down(NamedTuple):
    weights: Weights


class Up(NamedTuple):
    weights: Weights  # w_i
    samples: Samples  # () n_i


@dataclass(frozen=True)
class pFedMe(Method[Server, State, Down, Up]):
    pull: float = field(default=10.0, metadata={"help": "pull between personal model and local copy (λ)", "low": 0})
    steps: int = field(default=5, metadata={"help": "steps of the personal model on every mini-batch (K)", "low": 1})
    personal_lr: float | None = field(
        default=None, metadata={"help": "learning rate of the personal model (η_p); default: lr", "low": 0}
    )
    server_step: float = field(
        default=1.0, metadata={"help": "step of the server towards the clients' mean (β)", "low": 0}
    )
    use_local: bool = field(default=False, metadata={"help": "predict with the local copy (w), not the personal model"})

    title: ClassVar[str] = "pFedMe"
    formula: ClassVar[str] = """
        θ_i ≈ argmin over θ of f_i(θ) + λ/2 |θ - w_i|²
        w_i ← w_i - η λ (w_i - θ_i)
        w ← (1 - β) w + β Σ_i p_i w_i
    """
    family: ClassVar[str] = "regularized"
    results: ClassVar[dict[str, str]] = {"pFedMe": "post"}
    needs_sgd: ClassVar[str] = "a step towards the personal model is lr times λ times their distance"
    protections: ClassVar[Protections] = {"dp-client": ALLOWED, "dp-sample": ALLOWED}

    def server_init(self, model: Model, census: Census) -> Server:
        return Server(model.start)

    def server_send(self, server: Server, client: Tensor) -> Down:
        return Down(server.weights)

    def client_init(self, model: Model, data: Data, welcome: Tree) -> State:
        return State(model.start)

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
        lr = self.train.lr if self.personal_lr is None else self.personal_lr
        inner = self.train.but(lr=lr, momentum=0.0)
        outer = self.train.lr * data.rate * self.pull  # ηλ

        def solve(personal: Weights, local: Weights, batch: Batch) -> Weights:
            """Approximate minimum θ of f(θ) + λ/2 ||θ - w||², by a few steps from the previous θ."""

            def loss(theta: Weights, batch: Batch) -> Tensor:
                return model.loss(model(theta, batch.x), batch) + self.pull / 2 * squared_distance(theta, local)

            for _ in range(self.steps):
                personal, _ = inner.step(personal, loss, batch, data.rate, {})
            return personal

        def step(models: tuple[Weights, Weights], batch: Batch) -> tuple[Weights, Weights]:
            personal, local = solve(*models, batch), models[1]
            moved = tree.blend(personal, local, batch.paced(outer))  # w - ηλ (w - θ)
            return personal, moved if batch.active is None else tree.where(batch.active, moved, local)

        personal, local = fold((down.weights, down.weights), ((step, run) for run in self.train.runs(data)))
        return State(local if self.use_local else personal), Up(local, data.samples)

    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        mean = tree.average(ups.weights, ups.samples)
        return Server(tree.apply(lambda old, new: old.lerp(new, self.server_step), server.weights, mean))

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        return model(state.weights, x)

    def server_predict(self, model: Model, server: Server, x: Tensor) -> Tensor:
        return model(server.weights, x)
