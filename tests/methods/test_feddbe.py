"""FedDBE against a loop written from the paper: personal bias, moving mean, consensus of the first round."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.core import tree
from coterie.core.statistics import vectors
from coterie.core.training import LocalTraining
from coterie.execution import Turn
from coterie.methods.fedavg import FedAvg
from coterie.methods.feddbe import FedDBE, Up, batch_mean
from tests import plain, toy

SGD = LocalTraining(local_epochs=2, batch_size=8, lr=0.05, momentum=0.5, weight_decay=1e-3)


def features(net: nn.Module, x: Tensor) -> Tensor:
    return nn.Sequential(*list(net.children())[:-1])(x)


class Plain:
    def __init__(self, pull: float, momentum: float, batch_norm: bool) -> None:
        self.pull, self.momentum, self.batch_norm = pull, momentum, batch_norm  # κ and μ
        self.shared = plain.copy(toy.network(batch_norm).double())
        self.biases = [torch.zeros(8, dtype=torch.float64) for _ in range(5)]
        self.running = [torch.zeros(8, dtype=torch.float64) for _ in range(5)]
        self.consensus: Tensor | None = None

    def round(self, joined: list[int], turn: Turn) -> None:
        models, means = zip(*(self.client(i, turn) for i in joined), strict=True)
        sizes = [plain.data().train.sizes[i] for i in joined]
        self.shared = plain.mean(models, sizes)
        if self.consensus is None:
            self.consensus = sum(n * m for n, m in zip(sizes, means, strict=True)) / sum(sizes)  # type: ignore[assignment]

    def client(self, i: int, turn: Turn) -> tuple[dict[str, Tensor], Tensor]:
        net = toy.network(self.batch_norm).double()
        net.load_state_dict(self.shared, strict=False)
        bias = nn.Parameter(self.biases[i].clone())
        optimiser = plain.optimiser([*net.parameters(), bias], SGD, turn)
        for x, y in plain.batches(plain.data(), i, turn, SGD):
            optimiser.zero_grad()
            z = features(net, x)
            loss = F.cross_entropy(net[-1](z + bias), y)  # type: ignore[index]
            mean = (1 - self.momentum) * self.running[i] + self.momentum * z.mean(0)
            self.running[i] = mean.detach()
            if self.consensus is not None:
                loss = loss + self.pull / 2 * F.mse_loss(mean, self.consensus)
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        self.biases[i] = bias.detach()
        x = (plain.data().train.client(i)[0].double() / 255 - 0.5) / 0.5
        with torch.no_grad():
            return plain.copy(net), features(net.eval(), x).mean(0)


@pytest.mark.parametrize("momentum", [1.0, 0.3])
@pytest.mark.parametrize("batch_norm", [False, True], ids=["plain", "batchnorm"])
def test_three_rounds_equal_the_plain_implementation(momentum: float, batch_norm: bool) -> None:
    expected = Plain(2.0, momentum, batch_norm)
    for joined, turn in plain.ROUNDS:
        expected.round(joined, turn)
    method = FedDBE(train=SGD, pull=2.0, inertia=1 - momentum)
    server, clients = plain.federation(method, plain.data(), toy.model(batch_norm=batch_norm))
    plain.assert_close(plain.named(server.weights, toy.network(batch_norm)), expected.shared)
    assert expected.consensus is not None
    plain.assert_close({"consensus": server.consensus}, {"consensus": expected.consensus})
    for i in range(5):
        state = clients.states[i]
        found = {"bias": state.bias, "mean": state.mean}
        plain.assert_close(found, {"bias": expected.biases[i], "mean": expected.running[i]})


def test_one_step_of_the_first_round_is_fedavg() -> None:
    """There the bias is zero and the consensus unknown, so only later steps differ."""
    sgd, rounds = LocalTraining(local_epochs=1, batch_size=31, lr=0.05), plain.ROUNDS[:1]
    found, _ = plain.federation(FedDBE(train=sgd), plain.data(), toy.model(), rounds)
    averaged, _ = plain.federation(FedAvg(train=sgd), plain.data(), toy.model(), rounds)
    toy.assert_same(tree.flatten(found.weights), tree.flatten(averaged.weights))


def test_the_pull_counts_by_default() -> None:
    """Elsewhere its default is 0, and only the bias is left."""
    one, other = (plain.federation(m, plain.data(), toy.model())[0] for m in (FedDBE(SGD, pull=0.5), FedDBE(SGD, 0.0)))
    assert FedDBE().pull == 50.0
    assert toy.distance(tree.flatten(one.weights), tree.flatten(other.weights)) > 1e-4


def test_two_clients_by_hand() -> None:
    """Means 2 and 6 of 1 and 3 samples: the consensus is 5, and stays 5."""
    method, start = FedDBE(), toy.model().start
    server, _ = plain.federation(method, plain.data(), toy.model(), [])
    means = torch.tensor([2.0, 6.0], dtype=torch.float64)[:, None].expand(2, 8)
    ups = Up(tree.stack([start, start]), means, torch.tensor([1.0, 3.0]))
    first = method.server_receive(server, torch.tensor([0, 1]), ups)
    assert first.consensus.tolist() == [5.0] * 8
    later = method.server_receive(first, torch.tensor([0, 1]), ups._replace(mean=means * 10))
    assert later.consensus.tolist() == [5.0] * 8


def test_means_are_sent_in_the_first_round_only() -> None:
    method = FedDBE(train=SGD)
    server, clients = plain.federation(method, plain.data(), toy.model(), plain.ROUNDS[:1])
    assert server.consensus.all()
    sent = method.server_send(server, torch.tensor(1))
    again = clients.train(torch.tensor([1]), tree.apply(lambda t: t[None], sent), Turn(1)).ups
    assert not again.mean.any()


def test_the_bias_stays_on_the_client_and_is_used() -> None:
    method, data, model = FedDBE(train=SGD), plain.data(), toy.model()
    server, clients = plain.federation(method, data, model, plain.ROUNDS[:1])
    state, down, x = clients.states[0], method.server_send(server, torch.tensor(0)), data.test.x[:3]
    z = model.features(down.weights.encoder, x)
    expected = model.logits(down.weights.head, z + state.bias)
    assert state.bias.any()
    torch.testing.assert_close(method.client_predict(model, state, down, x), expected)


def test_the_mean_of_a_batch_ignores_padding() -> None:
    z = torch.tensor([[1.0, 2.0], [3.0, 4.0], [100.0, 100.0]])
    assert batch_mean(z, torch.tensor([True, True, False])).tolist() == [2.0, 3.0]
    assert batch_mean(z, torch.tensor([False, False, False])).tolist() == [0.0, 0.0]


def test_pixels_share_one_bias_of_their_features() -> None:
    """Features (B, d, H, W): a bias of length d, and means over pixels."""
    data, model = toy.of_task("segmentation")
    method = FedDBE(train=SGD)
    server, clients = plain.federation(method, data, model, plain.ROUNDS[:1])
    state, down, x = clients.states[0], method.server_send(server, torch.tensor(0)), data.test.x[:3]
    z = model.features(down.weights.encoder, x)
    assert z.shape == (3, 8, 4, 12)
    assert state.bias.shape == server.consensus.shape == (8,)
    expected = model.logits(down.weights.head, z + state.bias[:, None, None])
    torch.testing.assert_close(method.client_predict(model, state, down, x), expected)
    torch.testing.assert_close(vectors(z, model.feature_axis), z.mean((2, 3)))
