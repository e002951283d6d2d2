"""The head is a Gaussian per class of features; each client interpolates the shared Gaussians with its own.

Connor J. McLaughlin, Lili Su: Personalized Federated Learning via Feature Distribution Adaptation, NeurIPS 2024.
The network's own head is not used. A client trains the encoder under the global Gaussians (one mean per class, one
covariance for all) and its class shares, then mixes global and local Gaussians with one coefficient β. The paper finds
it by L-BFGS on the loss of two-fold cross-validation; here it is the best of evenly spaced candidates, so that all
clients do the same work. A class of one sample is left out there; if all are, β is 0. The authors' code has a β for the
means and another for the covariance, unless `--single_beta` is given, and takes class means of more than two samples
only. Features come from a pass after training, and a class without samples has the global mean. As in the authors'
code, the identity is added to local covariances: small ones would give steep classifiers, and training would diverge.
The first global means are uniform on [0, 1), also as there: negative ones cannot be reached behind a ReLU, and training
would switch its units off. After the last round, each client fits its Gaussians again under the final encoder, as in
the authors' evaluation (`finished`); until then it has those of its last training.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from coterie.core import random, tree
from coterie.core.batch import Data, features
from coterie.core.init import generator, uniform
from coterie.core.losses import cross_entropy
from coterie.core.method import Census, Method
from coterie.core.model import Model
from coterie.core.protections import Protections, refused, robust
from coterie.core.ranges import Samples
from coterie.core.tree import Tree

EPS = 1e-4  # ε of the shrinkage of covariances and of class shares, which keeps them away from zero


class Gaussians(NamedTuple):
    means: Tensor  # (K, d) μ
    covariance: Tensor  # (d, d) Σ


class Server(NamedTuple):
    encoder: Tree
    gaussians: Gaussians


class State(NamedTuple):
    gaussians: Gaussians  # interpolated in the last training
    share: Tensor  # () β
    trained: Tensor  # () bool: whether there was one
    priors: Tensor  # (K,) π_i, class shares
    momentum: Tree
    tuned: Gaussians | tuple[()]  # after the last round: under the final encoder


class Down(NamedTuple):
    encoder: Tree
    gaussians: Gaussians


class Up(NamedTuple):
    encoder: Tree
    gaussians: Gaussians
    samples: Samples  # () n_i


@dataclass(frozen=True)
class pFedFDA(Method[Server, State, Down, Up]):
    share: float | None = field(
        default=None,
        metadata={"help": "share of the local Gaussians (β); default: by cross-validation", "low": 0, "high": 1},
    )
    candidates: int = field(default=11, metadata={"help": "values of β that cross-validation compares", "low": 2})
    ridge: float = field(default=1.0, metadata={"help": "added to the variances of local Gaussians", "low": 0})

    title: ClassVar[str] = "pFedFDA"
    formula: ClassVar[str] = """
        u_k = log π_ik - ½ (z - μ_k)ᵀ Σ⁻¹ (z - μ_k)
        (μ, Σ)_i ← β (μ̂, Σ̂)_i + (1 - β) (μ, Σ)
        θ_i = SGD(f_i; θ),  (θ, μ, Σ) ← Σ_i p_i (θ, μ, Σ)_i
    """
    family: ClassVar[str] = "prototypes"
    suits: ClassVar[tuple[str, ...]] = ("label shift", "feature shift")
    results: ClassVar[dict[str, str]] = {"pFedFDA": "finished"}
    protections: ClassVar[Protections] = {
        **robust(refused("order statistics of covariances are not a covariance; use clip"), "robust-clip"),
        "dp-client": refused("with noise, a covariance need not remain one"),
        "dp-sample": refused("clients send Gaussians of their features, without noise"),
    }
    needs_classes: ClassVar[bool] = True
    needs_encoder: ClassVar[bool] = True

    def server_init(self, model: Model, census: Census) -> Server:
        means = uniform(generator(model), (model.classes, model.dim), model.mean)
        return Server(model.start.encoder, Gaussians(means, identity(means)))

    def server_send(self, server: Server, client: Tensor) -> Down:
        return Down(server.encoder, server.gaussians)

    def client_init(self, model: Model, data: Data, welcome: Tree) -> State:
        means = model.mean.new_zeros(model.classes, model.dim)
        blank = Gaussians(means, identity(means))
        priors = data.counts / data.samples + EPS
        none = torch.zeros_like(data.rate)
        momentum = self.train.start(model.start.encoder)
        return State(blank, none, none > 0, priors / priors.sum(), momentum, tuned=())

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
        head = classifier(down.gaussians, state.priors)
        encoder, momentum = self.train(
            down.encoder,
            lambda w, batch: model.loss(scores(head, model.features(w, batch.x)), batch),
            data,
            state.momentum,
        )
        gaussians, share = self.adapted(model, encoder, state, down, data)
        trained = torch.ones_like(state.trained)
        return State(gaussians, share, trained, state.priors, momentum, ()), Up(encoder, gaussians, data.samples)

    def adapted(self, model: Model, encoder: Tree, state: State, down: Down, data: Data) -> tuple[Gaussians, Tensor]:
        """Gaussians of the features of this encoder, interpolated with the received ones, and β."""
        z = features(model, encoder, data, epoch=self.train.local_epochs)
        real = torch.ones_like(data.y, dtype=torch.bool) if data.real is None else data.real
        share = self.best_share(z, real, state, down, data)
        return interpolated(fitted(z, data.y, real, down.gaussians, self.ridge), down.gaussians, share), share

    def best_share(self, z: Tensor, real: Tensor, state: State, down: Down, data: Data) -> Tensor:
        """() β with the smallest loss in two-fold cross-validation; halves have equal parts of each class."""
        if self.share is not None:
            return torch.full_like(data.rate, self.share)
        usable = real & (data.counts[data.y] > 1)
        second = halves(data, usable)
        parts = [usable & ~second, usable & second]
        found = [fitted(z, data.y, part, down.gaussians, self.ridge) for part in parts]
        options = torch.linspace(0, 1, self.candidates, dtype=z.dtype, device=z.device)
        losses = []
        for share in options:
            total = torch.zeros_like(data.rate)
            for part, own in zip(reversed(parts), found, strict=True):  # fitted to one half, tested on the other
                head = classifier(interpolated(own, down.gaussians, share), state.priors)
                values = cross_entropy(scores(head, z), data.y)
                total = total + torch.where(part, values, 0.0).sum() / part.sum().clamp_min(1)
            losses.append(total)
        best = options.gather(0, torch.stack(losses).argmin(0, keepdim=True)).squeeze(0)
        return torch.where(usable.any(), best, 0.0)

    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        return Server(*tree.average((ups.encoder, ups.gaussians), ups.samples))

    def client_finish(self, model: Model, state: State, down: Down, data: Data) -> State:
        return state._replace(tuned=self.adapted(model, down.encoder, state, down, data)[0])

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        gaussians = state.tuned or tree.where(state.trained, state.gaussians, down.gaussians)
        return scores(classifier(gaussians, state.priors), model.features(down.encoder, x))

    def server_predict(self, model: Model, server: Server, x: Tensor) -> Tensor:
        even = torch.full_like(server.gaussians.means[:, 0], 1 / model.classes)
        return scores(classifier(server.gaussians, even), model.features(server.encoder, x))


def halves(data: Data, usable: Tensor) -> Tensor:
    """(n,) whether a sample is in the second half: every second one of its class, in a random order."""
    order = random.shuffle(random.derive(data.key, random.SPLIT), len(data.y), data.real)
    member = (data.y[:, None] == torch.arange(data.classes, device=data.y.device)) & usable[:, None]  # (n, K)
    rank = member[order].long().cumsum(0)[order.argsort()]  # (n, K) counted in that order
    return rank.gather(1, data.y[:, None])[:, 0] % 2 == 0


def fitted(z: Tensor, y: Tensor, real: Tensor, shared: Gaussians, ridge: float) -> Gaussians:
    """Class means and pooled covariance of the real features (n, d); the shared mean for absent classes."""
    member = (y[:, None] == torch.arange(len(shared.means), device=y.device)) & real[:, None]
    member = member.to(z.dtype)  # (n, K)
    counts = member.sum(0)[:, None]
    means = torch.where(counts > 0, member.T @ z / counts.clamp_min(1), shared.means)
    centered = torch.where(real[:, None], z - means[y], 0.0)
    scatter = centered.T @ centered / (counts.sum() - 1).clamp_min(1)
    return Gaussians(means, scatter + ridge * identity(z))


def identity(rows: Tensor) -> Tensor:
    """(d, d), for rows (..., d)."""
    return torch.eye(rows.shape[-1], dtype=rows.dtype, device=rows.device)


def interpolated(local: Gaussians, shared: Gaussians, share: Tensor) -> Gaussians:
    return tree.apply(lambda own, other: share * own + (1 - share) * other, local, shared)


def classifier(gaussians: Gaussians, priors: Tensor) -> tuple[Tensor, Tensor]:
    """Weights (K, d) and biases (K,) of the Bayes rule: Σ⁻¹ μ_k and log π_k - μ_k Σ⁻¹ μ_k / 2."""
    means, covariance = gaussians
    scale = covariance.diagonal().mean()
    steady = (1 - EPS) * covariance + EPS * scale * identity(covariance)
    weights = torch.linalg.solve_ex(steady, means.T)[0].T
    return weights, priors.log() - (means * weights).sum(1) / 2


def scores(head: tuple[Tensor, Tensor], z: Tensor) -> Tensor:
    """(B, K) logits of features (B, d)."""
    return z @ head[0].T + head[1]
