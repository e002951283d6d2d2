"""FedPAC with other head weights: a client's head gets more of the heads of clients whose prototypes fit it well.

Ding: ICLR 2023 Personalized Federated Learning with Feature Alignment and Classifier Collaboration,
2025 (a replication of FedPAC with a decision layer aggregated by class prototypes).
Equation (12) of that text lacks an index and (13) is normalized over the wrong one; here f_ij is the loss of j's
prototypes under i's head (or of i's under j's, `own->other`), and the weights of each client sum to 1.
Class losses are weighted by class frequency: aligned prototypes hardly differ, frequencies do.
A client's own prototypes count too: the text describes those of the other clients, but its general formula feeds client
A's prototypes to A's own head, and without them a client would drop the head that it trained.
The rule for negative losses is omitted, since cross entropy is never negative.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from coterie.core import tree
from coterie.core.batch import Batch, Data, features
from coterie.core.errors import CoterieError, unknown
from coterie.core.losses import squared_error
from coterie.core.method import Census, Method
from coterie.core.model import Model, Weights
from coterie.core.protections import ALLOWED, OWN_MEANS, OWN_ROWS, SEND_STATISTICS, Protections, refused, unless
from coterie.core.ranges import Counted
from coterie.core.statistics import class_statistics, merge_means
from coterie.core.tree import Tree

READINGS = ("other->own", "own->other")
CLASS_WEIGHTS = ("prior", "uniform")


class Server(NamedTuple):
    encoder: Tree
    heads: Tree  # combined heads of all m clients
    prototypes: Tensor  # (K, d) c; a zero row: class not seen yet
    head_weights: Tensor  # (S, S) α of the last round, row i = client i


class State(NamedTuple):
    head_momentum: Tree
    encoder_momentum: Tree


class Down(NamedTuple):
    encoder: Tree
    head: Tree  # φ~_i
    prototypes: Tensor  # (K, d) c


class Up(NamedTuple):
    encoder: Tree
    head: Tree
    prototypes: Tensor  # (K, d) ĉ_i
    counts: Counted  # (K,) n_ik


@dataclass(frozen=True)
class FedPACProto(Method[Server, State, Down, Up]):
    align: float = field(
        default=1.0, metadata={"help": "strength of feature alignment (λ); 0 switches it off", "low": 0}
    )
    head_epochs: int = field(
        default=1, metadata={"help": "epochs of the head, which is trained before the encoder", "low": 0}
    )
    head_lr: float = field(default=0.1, metadata={"help": "learning rate of the head (η_g)", "low": 0})
    proto_to_head: str = field(
        default="other->own",
        metadata={"help": "whose prototypes are evaluated under whose head: other->own or own->other"},
    )
    class_weight: str = field(default="prior", metadata={"help": "weight of a class in that loss: prior or uniform"})

    title: ClassVar[str] = "FedPAC-Proto"
    formula: ClassVar[str] = """
        φ_i ← Σ_j α_ij φ_j',  α_ij = e^{-f_ij} / Σ_l e^{-f_il}
        f_ij = Σ_k n_jk / n_j ℓ(φ_i'(c_jk), k)
    """
    family: ClassVar[str] = "prototypes"
    suits: ClassVar[tuple[str, ...]] = ("label shift",)
    results: ClassVar[dict[str, str]] = {"FedPAC-Proto": "pre"}
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

    def __post_init__(self) -> None:
        if self.proto_to_head not in READINGS:
            raise unknown("direction of prototypes", self.proto_to_head, READINGS)
        if self.class_weight not in CLASS_WEIGHTS:
            raise unknown("class weight", self.class_weight, CLASS_WEIGHTS)

    def server_init(self, model: Model, census: Census) -> Server:
        if not isinstance(model.head, nn.Linear):
            raise CoterieError(
                "FedPAC-Proto needs a head of one linear layer, which the server can apply to prototypes"
            )
        heads = tree.apply(lambda t: t.expand(len(census.samples), *t.shape).clone(), model.start.head)
        prototypes = model.mean.new_zeros(model.classes, model.dim)
        return Server(model.start.encoder, heads, prototypes, torch.zeros(0, 0, dtype=torch.float64))

    def server_send(self, server: Server, client: Tensor) -> Down:
        return Down(server.encoder, tree.pick(server.heads, client), server.prototypes)

    def server_greet(self, server: Server) -> Down:
        return Down(server.encoder, tree.apply(lambda t: t.mean(0), server.heads), server.prototypes)

    def client_init(self, model: Model, data: Data, welcome: Tree) -> State:
        return State(self.train.start(model.start.head), self.train.start(model.start.encoder))

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
        z = features(model, down.encoder, data)  # (n, d)
        local = class_statistics(z, data.y, data.classes, data.real)
        head, head_momentum = self.train.but(local_epochs=self.head_epochs, lr=self.head_lr)(
            down.head,
            lambda head, batch: model.loss(model.logits(head, batch.x), batch),
            data.of(z),
            state.head_momentum,
        )

        seen = down.prototypes.any(1)  # (K,)
        target = torch.where(seen[:, None], down.prototypes, local.means)  # (K, d)
        align = self.align * seen.any()  # 0 in round 0

        def loss(encoder: Tree, batch: Batch) -> Tensor:
            z = model.features(encoder, batch.x)
            task = model.loss(model.logits(head, z), batch)
            return task + align * squared_error(z, target[batch.y]) if self.align else task

        encoder, encoder_momentum = self.train(down.encoder, loss, data, state.encoder_momentum)
        z = features(model, encoder, data, epoch=self.train.local_epochs)
        prototypes = class_statistics(z, data.y, data.classes, data.real).means
        return State(head_momentum, encoder_momentum), Up(encoder, head, prototypes, local.counts)

    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        encoder = tree.average(ups.encoder, ups.counts.sum(1))
        prototypes = merge_means(ups.prototypes, ups.counts, server.prototypes)
        weights = self.head_weights(ups)  # (S, S)
        heads = tree.put(server.heads, clients, tree.mix(ups.head, weights))
        return Server(encoder, heads, prototypes, weights)

    def head_weights(self, ups: Up) -> Tensor:
        """(S, S) α, row i = client i: a softmax of -f_ij over j, eq. (13)."""
        bias = ups.head["bias"].double()[:, None, None] if "bias" in ups.head else 0.0
        logits = torch.einsum("hcd,pkd->hpkc", ups.head["weight"].double(), ups.prototypes.double()) + bias
        loss = logits.logsumexp(3) - logits.diagonal(dim1=2, dim2=3)  # (head of S, prototypes of S, K)
        mass = (ups.counts if self.class_weight == "prior" else ups.counts.sign()).double()
        fit = torch.einsum("hpk,pk->hp", loss, mass / mass.sum(1, keepdim=True))  # eq. (12)
        return torch.softmax(-fit if self.proto_to_head == "other->own" else -fit.T, 1)

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        return model(Weights(down.encoder, down.head), x)

    def server_report(self, server: Server) -> Tree:
        return {"head_weights": server.head_weights}
