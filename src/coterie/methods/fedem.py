"""Each client's data are a mixture of M shared components, learned by EM with averaging on the server.

Othmane Marfoq, Giovanni Neglia, Aurélien Bellet, Laetitia Kameni, Richard Vidal: Federated Multi-Task Learning under a
Mixture of Distributions, NeurIPS 2021.
FedEM-FT, from FedPAC's comparison (ICLR 2023), comes from the same run: after the last round every component is
fine-tuned with fixed responsibilities, or on all samples equally (`finetune_all`); the paper does not say which.
`train_all` trains components that way in every round: several FedAvgs, whose mixture is an ensemble.
Components are averaged over the participants; in the authors' code, absent clients count with the old components.
Between rounds (`pre`) a client uses the mixture weights of its last E-step; the final step computes new ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from coterie.core import tree
from coterie.core.batch import Data, each, sample_losses
from coterie.core.init import networks
from coterie.core.method import Census, Method
from coterie.core.model import Model, Weights
from coterie.core.protections import ALLOWED, Protections, refused
from coterie.core.ranges import Samples
from coterie.core.training import LocalTraining
from coterie.core.tree import Tree

SMALLEST = 1e-12  # mixture weight, to take its logarithm


class Mixture(NamedTuple):
    components: Weights  # (M, ...)
    shares: Tensor  # (M,) π_i


class Server(NamedTuple):
    components: Weights  # (M, ...)


class State(NamedTuple):
    shares: Tensor  # (M,) π_i
    momentum: Tree  # (M, ...)
    tuned: Mixture | tuple[()]  # after the last round: the fine-tuned mixture


class Down(NamedTuple):
    components: Weights  # (M, ...)


class Up(NamedTuple):
    components: Weights  # (M, ...)
    samples: Samples  # () n_i


@dataclass(frozen=True)
class FedEM(Method[Server, State, Down, Up]):
    components: int = field(default=3, metadata={"help": "components of the mixture (M)", "low": 1})
    train_all: bool = field(
        default=False, metadata={"help": "train every component on all samples equally, without responsibilities"}
    )
    finetune_epochs: int | None = field(
        default=None, metadata={"help": "epochs of fine-tuning at the end; default: local epochs", "low": 0}
    )
    finetune_all: bool = field(
        default=False, metadata={"help": "fine-tune every component on all samples equally, without responsibilities"}
    )

    title: ClassVar[str] = "FedEM"
    formula: ClassVar[str] = """
        q_nm ∝ π_im e^{-ℓ_n(w_m)} for sample n,  π_im = mean of q_nm over n
        w_im = SGD(mean of q_nm ℓ_n over n; w_m)
        w_m ← Σ_i p_i w_im,  p(y | x) = Σ_m π_im p(y | x; w_m)
    """
    family: ClassVar[str] = "mixture"
    suits: ClassVar[tuple[str, ...]] = ("label shift", "new clients")
    results: ClassVar[dict[str, str]] = {"FedEM": "pre", "FedEM-FT": "finished"}
    protections: ClassVar[Protections] = {
        "dp-client": ALLOWED,
        "dp-sample": refused("a sample's weight depends on all samples of the client, without noise"),
    }

    def server_init(self, model: Model, census: Census) -> Server:
        return Server(networks(model, self.components))

    def server_send(self, server: Server, client: Tensor) -> Down:
        return Down(server.components)

    def client_init(self, model: Model, data: Data, welcome: Tree) -> State:
        shares = data.rate.new_full((self.components,), 1 / self.components)
        return State(shares, tree.stack([self.train.start(model.start)] * self.components), tuned=())

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
        responsibilities, shares = self.expect(model, Mixture(down.components, state.shares), data)
        if self.train_all:
            responsibilities = torch.ones_like(responsibilities)
        components, momentum = self.maximise(self.train, model, down, responsibilities, data, state.momentum)
        return State(shares, momentum, tuned=()), Up(components, data.samples)

    def expect(self, model: Model, mixture: Mixture, data: Data) -> tuple[Tensor, Tensor]:
        """E-step: responsibilities (n, M) of the components for each sample, and their mean π_i (M,)."""
        losses = each(lambda w: sample_losses(model, w, data), (mixture.components,), data).T  # (n, M)
        responsibilities = (mixture.shares.clamp_min(SMALLEST).log() - losses).softmax(1)
        return responsibilities, data.mean(responsibilities)

    def maximise(
        self, train: LocalTraining, model: Model, down: Down, responsibilities: Tensor, data: Data, momentum: Tree
    ) -> tuple[Weights, Tree]:
        """M-step: train every component, with samples weighted by its responsibilities."""

        def one(component: Weights, share: Tensor, momentum: Tree) -> tuple[Weights, Tree]:  # share: (n,)
            return train(
                component,
                lambda w, batch: share[batch.sample] * model.loss(model(w, batch.x), batch),
                data,
                momentum,
            )

        return each(one, (down.components, responsibilities.T, momentum), data)

    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        return Server(tree.average(ups.components, ups.samples))

    def client_finish(self, model: Model, state: State, down: Down, data: Data) -> State:
        responsibilities, shares = self.expect(model, Mixture(down.components, state.shares), data)
        epochs = self.train.local_epochs if self.finetune_epochs is None else self.finetune_epochs
        train = self.train.but(local_epochs=epochs)
        if self.finetune_all:
            responsibilities = torch.ones_like(responsibilities)
        components, _ = self.maximise(train, model, down, responsibilities, data, state.momentum)
        return state._replace(tuned=Mixture(components, shares))

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        components, shares = state.tuned or Mixture(down.components, state.shares)
        outputs = [model(tree.pick(components, j), x) for j in range(len(shares))]  # vmap would fix B in torch.export
        return model.task.mix(torch.stack(outputs), shares)  # log Σ_j π_ij p_j(y | x)
