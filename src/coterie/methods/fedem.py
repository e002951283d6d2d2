"""Every client's data are a mixture of M shared components: soft assignments on the client, averages on the server.

Marfoq, Neglia, Bellet, Kameni, Vidal: Federated Multi-Task Learning under a Mixture of Distributions,
NeurIPS 2021. FedEM-FT, from FedPAC's comparison (ICLR 2023), comes from the same run: after the last round every
component is fine-tuned with fixed responsibilities, or on all samples alike (`finetune_all`): the paper does not say.
With `train_all` they are trained so in every round: several FedAvgs, whose mixture is an ensemble.
Components are averaged over the participants; in the authors' code those who are absent count with the old ones.
Between trainings (`pre`) a client keeps the mixture weights of its last E-step; the final step takes a fresh one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from coterie.core import tree
from coterie.core.batch import Data, each, sample_losses
from coterie.core.errors import CoterieError
from coterie.core.init import networks
from coterie.core.losses import cross_entropy
from coterie.core.method import Census, Method
from coterie.core.model import Model, Weights
from coterie.core.optimizers import Sgd
from coterie.core.protections import ALLOWED, Protections, refused
from coterie.core.ranges import Samples
from coterie.core.tree import Tree

SMALLEST = 1e-12  # of a mixture weight, under the logarithm


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
    components: int = field(default=3, metadata={"help": "components of the mixture (M)"})
    train_all: bool = field(
        default=False, metadata={"help": "train every component on all samples alike, whoever answers for them"}
    )
    finetune_epochs: int | None = field(
        default=None, metadata={"help": "epochs of fine-tuning at the end; local epochs if not set"}
    )
    finetune_all: bool = field(
        default=False, metadata={"help": "fine-tune every component on all samples alike, whoever answers for them"}
    )

    title: ClassVar[str] = "FedEM"
    results: ClassVar[dict[str, str]] = {"FedEM": "pre", "FedEM-FT": "finished"}
    protections: ClassVar[Protections] = {
        "dp-client": ALLOWED,
        "dp-sample": refused(
            "every sample's weight follows from the mixture of all samples of the client, without noise"
        ),
    }

    def __post_init__(self) -> None:
        if self.components < 1:
            raise CoterieError(f"components must be at least 1, not {self.components}")

    def server_init(self, model: Model, census: Census) -> Server:
        return Server(networks(model, self.components))

    def server_send(self, server: Server, client: Tensor) -> Down:
        return Down(server.components)

    def client_init(self, model: Model, data: Data, welcome: Tree) -> State:
        shape = tree.stack([model.start] * self.components)
        return State(data.rate.new_full((self.components,), 1 / self.components), self.train.start(shape), tuned=())

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
        responsibilities, shares = self.expect(model, Mixture(down.components, state.shares), data)
        if self.train_all:
            responsibilities = torch.ones_like(responsibilities)
        components, momentum = self.maximise(self.train, model, down, responsibilities, data, state.momentum)
        return State(shares, momentum, tuned=()), Up(components, data.samples)

    def expect(self, model: Model, mixture: Mixture, data: Data) -> tuple[Tensor, Tensor]:
        """E-step: (n, M) how much each component answers for each sample, and (M,) π_i, the mean of that."""
        losses = each(lambda w: sample_losses(model, w, data), (mixture.components,), data).T  # (n, M)
        responsibilities = (mixture.shares.clamp_min(SMALLEST).log() - losses).softmax(1)
        return responsibilities, data.mean(responsibilities)

    def maximise(
        self, train: Sgd, model: Model, down: Down, responsibilities: Tensor, data: Data, momentum: Tree
    ) -> tuple[Weights, Tree]:
        """M-step: every component trained, each sample counting as much as the component answers for it."""

        def one(component: Weights, share: Tensor, momentum: Tree) -> tuple[Weights, Tree]:  # share: (n,)
            return train(
                component,
                lambda w, batch: share[batch.sample] * cross_entropy(model(w, batch.x), batch.y),
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
        alone = [model(tree.pick(components, j), x).log_softmax(1) for j in range(len(shares))]
        told = torch.stack(alone)  # (M, B, K); not by vmap, in which torch.export fixes the number of samples
        return (told + shares.clamp_min(SMALLEST).log()[:, None, None]).logsumexp(0)  # log Σ_j π_ij p_j(y | x)
