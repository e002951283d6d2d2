"""FedCRC against a loop with modules and three optimisers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.core import tree
from coterie.core.data import FederatedData
from coterie.core.losses import kl_divergence
from coterie.core.training import LocalTraining
from coterie.execution import Turn
from coterie.methods.fedcrc import Down, FedCRC, Server, State, Up
from tests import plain, toy

SGD = LocalTraining(local_epochs=2, batch_size=8, lr=0.05, momentum=0.5, weight_decay=1e-2)


class Plain:
    """Three steps with three fresh optimisers; what is not stepped on is not in the optimiser."""

    def __init__(self, data: FederatedData, method: FedCRC) -> None:
        self.data, self.method = data, method
        net: Any = toy.network().double()
        self.weights = plain.copy(net)
        self.heads = [plain.copy(net[-1]) for _ in data.train.sizes]

    def round(self, joined: list[int], turn: Turn) -> None:
        models = [self.client(i, turn) for i in joined]
        new = plain.mean(models, [self.data.train.sizes[i] for i in joined])
        tau = self.method.inertia
        self.weights = {
            n: tau * self.weights[n] + (1 - tau) * t if n.startswith("6.") else t for n, t in new.items()
        }  # module 6 is the head

    def client(self, i: int, turn: Turn) -> dict[str, Tensor]:
        net: Any = toy.network().double()
        net.load_state_dict(self.weights)
        own = nn.Linear(8, toy.CLASSES).double()
        own.load_state_dict(self.heads[i])
        encoder, shared = net[:-1], net[-1]

        def step(part: nn.Module, epochs: int | None, loss: Any) -> None:
            sgd = SGD if epochs is None else SGD.but(local_epochs=epochs)
            optimiser = plain.optimiser(part.parameters(), sgd, turn)
            for x, y in plain.batches(self.data, i, turn, sgd):
                optimiser.zero_grad()
                loss(x, y).backward()
                optimiser.step()

        def guided(x: Tensor, y: Tensor) -> Tensor:
            z = encoder(x).detach()
            told = F.softmax(own(z), 1).detach()
            guide = F.kl_div(F.log_softmax(shared(z), 1), told, reduction="batchmean")
            return F.cross_entropy(shared(z), y) + guide

        step(encoder, self.method.encoder_epochs, lambda x, y: F.cross_entropy(shared(encoder(x)), y))
        step(own, self.method.personal_epochs, lambda x, y: F.cross_entropy(own(encoder(x)), y))
        step(shared, self.method.shared_epochs, guided)
        self.heads[i] = plain.copy(own)
        return plain.copy(net)


@pytest.mark.parametrize("epochs", [{}, {"encoder_epochs": 1, "personal_epochs": 3, "shared_epochs": 4}])
@pytest.mark.parametrize("inertia", [0.99, 0.2])
def test_three_rounds_equal_the_plain_implementation(epochs: dict[str, Any], inertia: float) -> None:
    data, method = plain.data(), FedCRC(train=SGD, inertia=inertia, **epochs)
    expected = Plain(data, method)
    for joined, turn in plain.ROUNDS:
        expected.round(joined, turn)
    server, clients = plain.federation(method, data, toy.model())
    start = toy.model().start.head["weight"]
    assert not torch.equal(server.head["weight"], start)
    weights = {**server.encoder, **{f"6.{n}": t for n, t in server.head.items()}}
    plain.assert_close(weights, expected.weights)
    for i, head in enumerate(expected.heads):
        plain.assert_close(clients.states[i].head, head)


def test_with_full_inertia_the_encoder_is_that_of_fedbabu() -> None:
    model, data = toy.model(), toy.toy()
    found, _ = toy.looped(toy.method("fedcrc", inertia=1.0), model, data)
    babu, _ = toy.looped(toy.method("fedbabu", finetune="none"), model, data)
    for name, value in model.start.encoder.items():
        assert torch.equal(found[f"server.encoder.{name}"], babu[f"server.encoder.{name}"])
        assert not torch.equal(found[f"server.encoder.{name}"], value)
    for name, value in model.start.head.items():
        assert torch.equal(found[f"server.head.{name}"], value)


def test_only_the_head_moves_slowly() -> None:
    """Two clients with 1 and 3 samples: the encoder is their mean, the head goes a tenth of the way to it."""
    one = torch.ones(1, dtype=torch.float64)
    ups = Up({"w": torch.stack([one, 5 * one])}, {"v": torch.stack([one, 5 * one])}, torch.tensor([1.0, 3.0]))
    after = FedCRC(inertia=0.9).server_receive(Server({"w": 9 * one}, {"v": 9 * one}), torch.tensor([0, 1]), ups)
    assert after.encoder["w"].item() == pytest.approx(4.0)
    assert after.head["v"].item() == pytest.approx(0.9 * 9 + 0.1 * 4)


def test_the_own_head_is_the_teacher() -> None:
    """KL is not symmetric: Σ p log(p/q), p from the own head."""
    student, teacher = torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, 0.0]]).log()
    by_hand = 0.75 * torch.log(torch.tensor(0.75 / 0.5)) + 0.25 * torch.log(torch.tensor(0.25 / 0.5))
    torch.testing.assert_close(kl_divergence(student, torch.tensor([[3.0, 1.0]]).log()), by_hand[None])
    assert kl_divergence(student, teacher) != kl_divergence(teacher, student)


def test_two_models_of_one_run() -> None:
    model = toy.model()
    x = toy.toy().test.x[:5]
    encoder, head = model.start
    other = tree.apply(lambda t: t + 1.0 * torch.arange(len(t)).view(-1, *[1] * (t.ndim - 1)), head)
    method = FedCRC()
    personal = method.client_predict(model, State(other, {}, {}, {}), Down(encoder, head), x)
    shared = method.server_predict(model, Server(encoder, head), x)
    assert not torch.allclose(personal, shared)
    z = toy.network().double()[:-1]((x.double() / 255 - 0.5) / 0.5).detach()  # type: ignore[index]
    torch.testing.assert_close(personal, z @ other["weight"].T + other["bias"])
    torch.testing.assert_close(shared, z @ head["weight"].T + head["bias"])
    assert method.results == {"FedCRC": "global", "FedCRC-Per": "pre"}
