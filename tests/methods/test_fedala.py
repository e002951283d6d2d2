"""FedALA against a loop written from the paper: mixing weights by hand-made gradients, then torch's SGD."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from coterie.core import random, tree
from coterie.core.data import FederatedData
from coterie.core.training import LocalTraining
from coterie.execution import Turn
from coterie.execution.requests import keys
from coterie.methods.fedala import FedALA, mixed
from tests import plain, toy

SGD = LocalTraining(local_epochs=2, batch_size=8, lr=0.05, momentum=0.5, weight_decay=1e-3)
LAYERS = {1: ("6.",), 2: ("4.", "6."), 9: ("0.", "4.", "6.")}  # of the toy's network
ROUNDS = [*plain.ROUNDS, ([0, 1, 2, 3], Turn(3))]  # some clients for the third time


class Plain:
    def __init__(self, data: FederatedData, layers: int, first_epochs: int) -> None:
        self.data, self.first_epochs = data, first_epochs
        self.shared = plain.copy(network())
        self.names = [n for n in self.shared if n.startswith(LAYERS[layers])]
        clients = range(data.num_clients)
        self.local = [dict(self.shared) for _ in clients]
        self.mixing = [{n: torch.ones_like(self.shared[n]) for n in self.names} for _ in clients]
        self.rounds = [0] * data.num_clients

    def round(self, joined: list[int], turn: Turn) -> None:
        models = [self.client(i, turn) for i in joined]
        self.shared = plain.mean(models, [self.data.train.sizes[i] for i in joined])

    def client(self, i: int, turn: Turn) -> dict[str, Tensor]:
        epochs = (0, self.first_epochs)[self.rounds[i]] if self.rounds[i] < 2 else 1
        for batch in self.batches(i, turn, epochs):
            self.descend(i, *batch)
        net = network()
        net.load_state_dict(self.start(i))
        optimiser = plain.optimiser(net.parameters(), SGD, turn)
        for x, y in plain.batches(self.data, i, turn, SGD):
            optimiser.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimiser.step()
        self.local[i], self.rounds[i] = plain.copy(net), self.rounds[i] + 1
        return self.local[i]

    def start(self, i: int) -> dict[str, Tensor]:
        own = self.local[i]
        return self.shared | {n: own[n] + (self.shared[n] - own[n]) * self.mixing[i][n] for n in self.names}

    def descend(self, i: int, x: Tensor, y: Tensor) -> None:
        """W <- clip(W - η ∇f (θ - θ_i)): the chain rule, written out."""
        weights = {n: t.clone().requires_grad_() for n, t in self.start(i).items()}
        loss = F.cross_entropy(functional_call(network(), weights, (x,)), y)
        slopes = dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))
        for n, share in self.mixing[i].items():
            self.mixing[i][n] = (share - slopes[n] * (self.shared[n] - self.local[i][n])).clamp(0, 1)

    def batches(self, i: int, turn: Turn, epochs: int) -> list[tuple[Tensor, Tensor]]:
        """Of 80 percent of the client's samples, drawn in every round."""
        x, y = self.data.train.client(i)
        key = random.derive(keys(plain.SEED, turn, torch.tensor(i)), random.EXPLORE)
        chosen = random.shuffle(random.derive(key, random.SPLIT), len(y))[: int(0.8 * len(y))]
        x, y = ((x.double() / 255 - 0.5) / 0.5)[chosen], y[chosen]
        orders = [random.shuffle(random.derive(key, random.SHUFFLE, epoch), len(y)) for epoch in range(epochs)]
        return [(x[index], y[index]) for order in orders for index in torch.split(order, SGD.batch_size)]


def network() -> nn.Module:
    return toy.network().double()


@pytest.mark.parametrize("layers", [1, 2, 9])
def test_four_rounds_equal_the_plain_implementation(layers: int) -> None:
    """Clients are in their first, second and third round; one layer of the network, two, and all."""
    net = network()
    assert {n.partition(".")[0] + "." for n, _ in net.named_parameters()} == {"0.", "4.", "6."}
    data = plain.data()
    expected = Plain(data, layers, first_epochs=3)
    for joined, turn in ROUNDS:
        expected.round(joined, turn)
    server, clients = plain.federation(FedALA(train=SGD, layers=layers, first_epochs=3), data, toy.model(), ROUNDS)
    plain.assert_close(plain.named(server.weights, net), expected.shared)
    last = len(net) - 1  # type: ignore[arg-type]
    for i, mixing in enumerate(expected.mixing):
        own = clients.states[i].mixing.items()
        found = {n.removeprefix("encoder.").replace("head.", f"{last}."): t for n, t in own}
        plain.assert_close(found, mixing)
    assert any((share < 1).any() for mixing in expected.mixing for share in mixing.values())


def test_without_layers_it_is_fedavg() -> None:
    found, _ = toy.looped(toy.method("fedala", layers=0), toy.model(), toy.toy())
    averaged, _ = toy.looped(toy.method("fedavg"), toy.model(), toy.toy())
    weights = [name for name in averaged if name.startswith("server.weights")]
    toy.assert_same({n: found[n] for n in weights}, {n: averaged[n] for n in weights})


def test_without_learning_it_is_fedavg() -> None:
    """W = 1 takes the received model."""
    found, _ = toy.looped(toy.method("fedala", mixing_lr=0.0), toy.model(), toy.toy())
    averaged, _ = toy.looped(toy.method("fedavg"), toy.model(), toy.toy())
    weights = [name for name in averaged if name.startswith("server.weights")]
    assert toy.distance({n: found[n] for n in weights}, {n: averaged[n] for n in weights}) < 1e-14


def test_the_first_round_takes_the_received_model() -> None:
    """Also of a client that first joins late, whose own model is the initial one."""
    data, method = plain.data(), FedALA(train=SGD, first_epochs=2)
    _, clients = plain.federation(method, data, toy.model(), [([0, 1], Turn(0)), ([2], Turn(1))])
    assert all((t == 1).all() for t in clients.states[2].mixing.values())


@pytest.mark.parametrize("layers", [1, 2])
def test_stacked_equals_looped_with_more_layers(layers: int) -> None:
    method, model = toy.method("fedala", layers=layers, first_epochs=2), toy.model(batch_norm=True)
    looped, stacked = (run(method, model, toy.toy(), rounds=4)[0] for run in (toy.looped, toy.stacked))
    assert toy.distance(looped, stacked) < 1e-10


def test_a_mixture_by_hand() -> None:
    """Own 2, received 6: a quarter of the way is 3, and what is not mixed is received."""
    model = toy.model()
    received = tree.apply(lambda t: torch.full_like(t, 6.0), model.start)
    upper = {"head.bias": torch.full((4,), 2.0, dtype=torch.float64)}
    made = mixed(received, upper, {"head.bias": torch.full((4,), 0.25, dtype=torch.float64)})
    assert made.head["bias"].tolist() == [3.0] * 4
    assert (made.head["weight"] == 6).all()
    assert (made.encoder["0.weight"] == 6).all()


def test_layers_are_counted_from_the_top() -> None:
    weights = toy.model(batch_norm=True).start
    assert set(FedALA(layers=1).upper(weights)) == {"head.weight", "head.bias"}
    assert {name.rpartition(".")[0] for name in FedALA(layers=3).upper(weights)} == {"encoder.1", "encoder.5", "head"}
    assert not any(tree.is_statistic(name) for name in FedALA(layers=9).upper(weights))


def test_two_rounds_of_two_clients_by_hand() -> None:
    """f_i(w) = (w - y_i)², y = 0 and 3, from w = 1 with η = 0.25: steps go half of the way to y.

    Round 1: models 0.5 and 2, of 1 and 3 samples: w = 1.625. Round 2: the slope of W at 1 is 2 (w - y_i) (w - w_i),
    3.65625 and 1.03125, so W = 0.634375 and 0.896875 with a rate of 0.1; then half of the way to y again.
    """
    data, model = plain.parabolas()
    sgd = LocalTraining(local_epochs=1, batch_size=3, lr=0.25, momentum=0.0)
    method = FedALA(train=sgd, mixing_lr=0.1, first_epochs=1)
    first, _ = plain.federation(method, data, model, [([0, 1], Turn(0))])
    assert float(first.weights.head["weight"]) == pytest.approx(1.625)
    server, clients = plain.federation(method, data, model, [([0, 1], Turn(0)), ([0, 1], Turn(1))])
    mixtures = [0.5 + 1.125 * 0.634375, 2 - 0.375 * 0.896875]
    trained = [mixtures[0] / 2, (mixtures[1] + 3) / 2]
    for i, share in enumerate((0.634375, 0.896875)):
        assert float(clients.states[i].mixing["head.weight"]) == pytest.approx(share)
        assert float(clients.states[i].upper["head.weight"]) == pytest.approx(trained[i])
    assert float(server.weights.head["weight"]) == pytest.approx(trained[0] / 4 + trained[1] * 3 / 4)
