"""FML against two modules and two optimizers a client."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.core.batch import Data
from coterie.core.data import FederatedData
from coterie.core.training import LocalTraining
from coterie.execution import Turn
from coterie.methods.fml import FML
from tests import plain, toy

SGD = LocalTraining(local_epochs=2, batch_size=8, lr=0.05, momentum=0.5, weight_decay=1e-3)


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """Mean over the batch of Σ p log(p / q)."""
    p, q = teacher.softmax(1), student.softmax(1)
    return (p * (p / q).log()).sum(1).mean()


class Plain:
    def __init__(self, data: FederatedData, batch_norm: bool, alpha: float, beta: float) -> None:
        self.data, self.alpha, self.beta = data, alpha, beta
        self.nets: list[Any] = [toy.network(batch_norm).double() for _ in data.train.sizes]
        self.meme: Any = toy.network(batch_norm).double()

    def train(self, i: int, turn: Turn) -> dict[str, Tensor]:
        own, meme = self.nets[i], copy.deepcopy(self.meme)
        optimizers = [plain.optimiser(net.parameters(), SGD, turn) for net in (own, meme)]
        for x, y in plain.batches(self.data, i, turn, SGD):
            mine, theirs = own(x), meme(x)
            personal = self.alpha * F.cross_entropy(mine, y) + (1 - self.alpha) * divergence(theirs.detach(), mine)
            shared = self.beta * F.cross_entropy(theirs, y) + (1 - self.beta) * divergence(mine.detach(), theirs)
            for optimizer in optimizers:
                optimizer.zero_grad()
            personal.backward()
            shared.backward()
            for optimizer in optimizers:
                optimizer.step()
        return plain.copy(meme)

    def round(self, joined: list[int], turn: Turn) -> None:
        trained = [self.train(i, turn) for i in joined]
        self.meme.load_state_dict(plain.mean(trained, [self.data.train.sizes[i] for i in joined]), strict=False)


@pytest.mark.parametrize("batch_norm", [False, True], ids=["plain", "batchnorm"])
@pytest.mark.parametrize(("alpha", "beta"), [(0.5, 0.5), (0.2, 0.9), (0.0, 1.0)])
def test_three_rounds_equal_the_plain_implementation(alpha: float, beta: float, batch_norm: bool) -> None:
    expected = Plain(plain.data(), batch_norm, alpha, beta)
    for joined, turn in plain.ROUNDS:
        expected.round(joined, turn)
    method = FML(train=SGD, personal_share=alpha, shared_share=beta)
    server, clients = plain.federation(method, expected.data, toy.model(batch_norm=batch_norm))
    plain.assert_close(plain.named(server.weights, expected.meme), plain.copy(expected.meme))
    for i, net in enumerate(expected.nets):
        plain.assert_close(plain.named(clients.states[i].weights, net), plain.copy(net))


def test_without_distillation_it_is_local_training_and_fedavg() -> None:
    found, _ = toy.looped(toy.method("fml", personal_share=1.0, shared_share=1.0), toy.model(), toy.toy())
    alone, _ = toy.looped(toy.method("local"), toy.model(), toy.toy())
    together, _ = toy.looped(toy.method("fedavg"), toy.model(), toy.toy())
    own, server = ({n: t for n, t in found.items() if part in n} for part in (".weights.", "server.weights."))
    assert toy.distance(server, {n: t for n, t in together.items() if n in server}) < 1e-12
    own = {n: t for n, t in own.items() if n.startswith("states")}
    assert own
    assert toy.distance(own, {n: t for n, t in alone.items() if n in own}) < 1e-12


def test_one_step_of_one_weight_by_hand() -> None:
    """Two classes, one feature x = 1, heads of zeros but one: outputs (a, 0) and (0, 0), so p = σ(a) and q = 1/2.

    Label 0, rate 1. Personal: α (p - 1) + (1 - α) (p - q). Shared: β (q - 1) + (1 - β) (q - p).
    """
    a, alpha, beta = 0.8, 0.3, 0.6
    p, q = torch.sigmoid(torch.tensor(a, dtype=torch.float64)).item(), 0.5
    data, model = plain.line(clients=2, samples=1)
    x = torch.zeros(2, 3, dtype=torch.float64)
    x[:, 0] = 1
    data.train.x.copy_(x)
    data.train.y.zero_()
    method = FML(train=LocalTraining(local_epochs=1, batch_size=1, lr=1.0), personal_share=alpha, shared_share=beta)
    server, clients = plain.federation(method, data, model, [])
    state = clients.states[0]
    weight = state.weights.head["weight"].clone()
    weight[0, 0] = a
    state = state._replace(weights=state.weights._replace(head={**state.weights.head, "weight": weight}))
    rate = torch.ones((), dtype=torch.float64)
    one = Data(x[:1], torch.zeros(1, dtype=torch.int64), plain.random.seed_key(0), rate, 2, data.transform)
    after, up = method.client_train(model, state, method.server_send(server, torch.tensor(0)), one)
    personal, shared = after.weights.head["weight"][0, 0], up.shared.head["weight"][0, 0]
    assert float(personal) == pytest.approx(a - (alpha * (p - 1) + (1 - alpha) * (p - q)))
    assert float(shared) == pytest.approx(-(beta * (q - 1) + (1 - beta) * (q - p)))
