"""FedPAC aligns features to global class prototypes and gives each client its own combination of all heads.

Jian Xu, Xinyi Tong, Shao-Lun Huang: Personalized Federated Learning with Feature Alignment and Classifier
Collaboration, ICLR 2023.
As in the authors' code: statistics for the head weights come from the encoder as received, prototypes from the trained
one; features are not centered; no alignment in round 0.
Unlike their code: quadratic programs are solved exactly in float64, without a fallback to the client's own head; a
class that no participant has keeps its prototype; the head is trained on the features that the statistics come from.
For concept shift the paper only mentions a slight modification. `personal_prototypes` is our reading: prototypes are
averaged with each client's head weights, which leaves out clients for which a label means something else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from coterie.core import tree
from coterie.core.batch import Batch, Data, features
from coterie.core.losses import squared_error
from coterie.core.method import Census, Method
from coterie.core.model import Model, Weights
from coterie.core.protections import ALLOWED, OWN_MEANS, OWN_ROWS, SEND_STATISTICS, Protections, refused, unless
from coterie.core.ranges import Counted, Variance
from coterie.core.statistics import class_statistics, merge_means
from coterie.core.tree import Tree
from coterie.methods.fedpac.head_weights import head_weights


class Server(NamedTuple):
    encoder: Tree
    heads: Tree  # combined heads of all m clients
    prototypes: Tensor  # (K, d) c, or personal ones (m, K, d); a zero row: class not seen yet
    head_weights: Tensor  # (S, S) α of the last round, row i = client i


class State(NamedTuple):
    head_momentum: Tree
    encoder_momentum: Tree


class Down(NamedTuple):
    encoder: Tree
    head: Tree  # φ~_i
    prototypes: Tensor  # (K, d) c, or c_i


class Up(NamedTuple):
    encoder: Tree
    head: Tree
    prototypes: Tensor  # (K, d) ĉ_i
    moments: Tensor  # (K, d) h_i: class means times class frequencies
    variance: Variance  # () v_i
    counts: Counted  # (K,) n_ik


@dataclass(frozen=True)
class FedPAC(Method[Server, State, Down, Up]):
    """Align features to global class prototypes, and give each client its own combination of all heads.

    Xu, Tong, Huang: Personalized Federated Learning with Feature Alignment and Classifier Collaboration, ICLR 2023.

    In a round, client i trains its head φ_i for `head_epochs`, then its encoder θ on

        loss(φ_i(θ(x)), y) + λ |θ(x) - c_y|² / d        (eq. 6; λ: `align`, c_y: prototype of class y, d: features)

    and sends both, its prototypes and its class statistics. The server averages encoders by samples, merges prototypes,
    and gives client i the head Σ_j α_ij φ_j, whose weights α_i ≥ 0, Σ_j α_ij = 1, minimize a bound on its test error.

    >>> import coterie
    >>> data = coterie.load_clients(num_clients=4, local_size=40, test_size=20)
    >>> result = coterie.run(coterie.FedPAC(align=0.5), data, "linear", rounds=1, progress=False)
    >>> result.server.head_weights.shape  # α
    torch.Size([4, 4])
    """

    align: float = field(
        default=1.0, metadata={"help": "strength of feature alignment (λ); 0 switches it off", "low": 0}
    )
    combine: bool = field(default=True, metadata={"help": "combine the heads of all clients"})
    head_epochs: int = field(
        default=1, metadata={"help": "epochs of the head, which is trained before the encoder", "low": 0}
    )
    head_lr: float = field(default=0.1, metadata={"help": "learning rate of the head (η_g)", "low": 0})
    cut: float = field(
        default=1e-3, metadata={"help": "head weights up to this value are set to zero (ε)", "low": 0, "below": 1}
    )
    personal_prototypes: bool = field(
        default=False, metadata={"help": "average prototypes with each client's head weights, against concept shift"}
    )

    title: ClassVar[str] = "FedPAC"
    formula: ClassVar[str] = """
        φ_i' = SGD(f_i(θ, ·); φ_i),  θ_i = SGD(f_i(·, φ_i') + λ |z - c_y|² / d; θ)
        φ_i ← Σ_j α_ij φ_j',  α_i = argmin over the simplex of Σ_j α_j² v_j + |Σ_j α_j (h_j - h_i)|²
        θ ← Σ_i p_i θ_i,  c_k ← Σ_i n_ik c_ik / Σ_i n_ik
    """
    family: ClassVar[str] = "prototypes"
    suits: ClassVar[tuple[str, ...]] = ("label shift",)
    results: ClassVar[dict[str, str]] = {"FedPAC": "pre"}
    protections: ClassVar[Protections] = {
        "robust-median": refused(OWN_ROWS),
        "dp-client": refused(
            "its server combines heads for each client by class statistics, not by a mean over all; "
            "--dp-statistics protects samples there"
        ),
        "dp-sample": refused(SEND_STATISTICS),
        "dp-statistics": ALLOWED,
        "dp-both": unless(OWN_MEANS, align=0.0),
    }
    needs_classes: ClassVar[bool] = True
    needs_head: ClassVar[bool] = True

    def server_init(self, model: Model, census: Census) -> Server:
        heads = tree.apply(lambda t: t.expand(len(census.samples), *t.shape).clone(), model.start.head)
        clients = (len(census.samples),) if self.personal_prototypes else ()
        prototypes = model.mean.new_zeros(*clients, model.classes, model.dim)
        return Server(model.start.encoder, heads, prototypes, torch.zeros(0, 0, dtype=torch.float64))

    def server_send(self, server: Server, client: Tensor) -> Down:
        prototypes = server.prototypes[client] if self.personal_prototypes else server.prototypes
        return Down(server.encoder, tree.pick(server.heads, client), prototypes)

    def server_greet(self, server: Server) -> Down:
        prototypes = torch.zeros_like(server.prototypes[0]) if self.personal_prototypes else server.prototypes
        return Down(server.encoder, tree.apply(lambda t: t.mean(0), server.heads), prototypes)

    def client_init(self, model: Model, data: Data, welcome: Tree) -> State:
        return State(self.train.start(model.start.head), self.train.start(model.start.encoder))

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
        z = features(model, down.encoder, data)  # (n, d)
        local = class_statistics(z, data.y, data.classes, data.real)
        frequency = local.counts / data.samples  # (K,)
        moments = frequency[:, None] * local.means
        variance = (frequency @ local.squares - moments.square().sum()).clamp_min(0) / data.samples

        head, head_momentum = self.train.but(local_epochs=self.head_epochs, lr=self.head_lr)(
            down.head,
            lambda head, batch: model.loss(model.logits(head, batch.x), batch),
            data.of(z),
            state.head_momentum,
        )

        seen = down.prototypes.any(1)  # (K,)
        target = torch.where(seen[:, None], down.prototypes, local.means)  # (K, d)
        align = self.align * seen.any()

        def loss(encoder: Tree, batch: Batch) -> Tensor:
            z = model.features(encoder, batch.x)
            task = model.loss(model.logits(head, z), batch)
            return task + align * squared_error(z, target[batch.y]) if self.align else task  # eq. (6)

        encoder, encoder_momentum = self.train(down.encoder, loss, data, state.encoder_momentum)
        z = features(model, encoder, data, epoch=self.train.local_epochs)
        prototypes = class_statistics(z, data.y, data.classes, data.real).means
        up = Up(encoder, head, prototypes, moments, variance, local.counts)
        return State(head_momentum, encoder_momentum), up

    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        encoder = tree.average(ups.encoder, ups.counts.sum(1))
        weights = self.head_weights(ups)  # (S, S)
        if self.personal_prototypes:  # c_ik = Σ_j α_ij n_jk ĉ_jk / Σ_j α_ij n_jk; zero where none of them has class k
            counts = weights.to(ups.counts.dtype)[:, :, None] * ups.counts  # (S, S, K)
            nothing = torch.zeros_like(ups.prototypes[0])
            own = torch.func.vmap(lambda shares: merge_means(ups.prototypes, shares, nothing))(counts)
            prototypes = tree.put(server.prototypes, clients, own)
        else:
            prototypes = merge_means(ups.prototypes, ups.counts, server.prototypes)
        heads = tree.put(server.heads, clients, tree.mix(ups.head, weights))
        return Server(encoder, heads, prototypes, weights)

    def head_weights(self, ups: Up) -> Tensor:
        """(S, S) α: row i minimizes the bound on client i's error over all combinations of heads."""
        if not self.combine:
            return torch.eye(len(ups.variance), dtype=torch.float64, device=ups.variance.device)
        weights = head_weights(ups.moments, ups.variance)
        weights = torch.where(weights > self.cut, weights, 0.0)
        return weights / weights.sum(1, keepdim=True)

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        return model(Weights(down.encoder, down.head), x)

    def server_report(self, server: Server) -> Tree:
        return {"head_weights": server.head_weights}
