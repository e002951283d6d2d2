"""FedPHP against plain loops: the inherited model, what it supervises, and what predicts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.core import tree
from coterie.core.data import FederatedData
from coterie.core.errors import CoterieError
from coterie.core.training import LocalTraining
from coterie.execution import Looped, Stacked, Turn
from coterie.methods.fedavg import FedAvg
from coterie.methods.fedphp import FedPHP, discrepancy
from tests import plain, toy

SGD = LocalTraining(local_epochs=1, batch_size=8, lr=0.05, momentum=0.5, weight_decay=1e-3)


def mmd(a: Tensor, b: Tensor) -> Tensor:
    """Mean over all pairs of k(a, a') + k(b, b') - 2 k(a, b), in loops; k: five kernels around the mean distance."""
    every = [*a, *b]
    with torch.no_grad():
        total = sum((u - v).square().sum() for u in every for v in every)
        mean = total / (len(every) ** 2 - len(every))

    def kernel(u: Tensor, v: Tensor) -> Tensor:
        return sum(torch.exp(-(u - v).square().sum() / (mean * 2.0**p)) for p in (-2, -1, 0, 1, 2))  # type: ignore[return-value]

    value = torch.zeros((), dtype=a.dtype)
    for i in range(len(a)):
        for j in range(len(a)):
            value = value + kernel(a[i], a[j]) + kernel(b[i], b[j]) - 2 * kernel(a[i], b[j])
    return value / len(a) ** 2


class Plain:
    def __init__(self, data: FederatedData, method: FedPHP) -> None:
        self.data, self.method = data, method
        self.weights = plain.copy(toy.network().double())
        self.inherited: dict[int, dict[str, Tensor]] = {}
        self.trainings = [0] * data.num_clients

    def round(self, joined: list[int], turn: Turn) -> None:
        trained = [self.client(i, turn) for i in joined]
        self.weights = plain.mean(trained, [self.data.train.sizes[i] for i in joined])

    def client(self, i: int, turn: Turn) -> dict[str, Tensor]:
        method, net = self.method, toy.network().double()
        net.load_state_dict(self.weights)
        past: nn.Module | None = None
        if i in self.inherited:
            past = toy.network().double()
            past.load_state_dict(self.inherited[i])
        optimiser = plain.optimiser(net.parameters(), SGD, turn)
        for x, y in plain.batches(self.data, i, turn, SGD):
            optimiser.zero_grad()
            z = net[:-1](x)  # type: ignore[index]
            logits = net[-1](z)  # type: ignore[index]
            loss = F.cross_entropy(logits, y)
            if past is not None:
                with torch.no_grad():
                    before, soft = past[:-1](x), (past(x) / 4).softmax(1)  # type: ignore[index]
                taught = mmd(z, before) if method.by == "features" else F.cross_entropy(logits, soft)
                loss = (1 - method.transfer) * loss + method.transfer * taught
            loss.backward()
            optimiser.step()
        own = plain.copy(net)
        kept = method.inherit * min(self.trainings[i] / method.growth, 1)
        if i in self.inherited:
            self.inherited[i] = {n: kept * t + (1 - kept) * own[n] for n, t in self.inherited[i].items()}
        else:
            self.inherited[i] = own
        self.trainings[i] += 1
        return own


@pytest.mark.long
@pytest.mark.parametrize("by", ["features", "outputs"])
def test_three_rounds_equal_the_plain_implementation(by: str) -> None:
    """Clients train twice, once, or twice after a pause; the share of the past grows from 0 to 0.8 in two trainings."""
    data = toy.toy(train=(6, 9, 3, 5, 1), augmented=False)
    method = FedPHP(train=SGD, inherit=0.8, growth=2, transfer=0.4, by=by)
    expected = Plain(data, method)
    for joined, turn in plain.ROUNDS:
        expected.round(joined, turn)
    server, clients = plain.federation(method, data, toy.model())
    plain.assert_close(plain.named(server.weights, toy.network()), expected.weights)
    for i, own in expected.inherited.items():
        plain.assert_close(plain.named(clients.states[i].inherited, toy.network()), own)
        assert int(clients.states[i].trainings) == expected.trainings[i]


def test_without_transfer_the_global_model_is_fedavgs() -> None:
    found, _ = plain.federation(FedPHP(train=SGD, transfer=0.0), plain.data(), toy.model())
    averaged, _ = plain.federation(FedAvg(train=SGD), plain.data(), toy.model())
    toy.assert_same(tree.flatten(found.weights), tree.flatten(averaged.weights))


def test_the_first_training_is_fedavgs() -> None:
    """There is no inherited model yet, whatever its weight."""
    once = plain.ROUNDS[:1]
    found, _ = plain.federation(FedPHP(train=SGD, transfer=0.9), plain.data(), toy.model(), once)
    averaged, _ = plain.federation(FedAvg(train=SGD), plain.data(), toy.model(), once)
    toy.assert_same(tree.flatten(found.weights), tree.flatten(averaged.weights))


def test_the_default_learns_the_task() -> None:
    """With all weight on the supervision, nothing would train."""
    data, start = plain.data(), toy.model()
    method = FedPHP(train=SGD)
    server, _ = plain.federation(method, data, start)

    def loss(weights: object) -> float:
        return float(F.cross_entropy(start(weights, data.train.x), data.train.y))  # type: ignore[arg-type]

    assert loss(server.weights) < loss(start.start) - 0.01
    with pytest.raises(CoterieError, match="transfer"):
        FedPHP(transfer=1.0)


def test_the_inherited_model_predicts_once_there_is_one() -> None:
    method, model, data = FedPHP(train=SGD), toy.model(), plain.data()
    server, clients = plain.federation(method, data, model, plain.ROUNDS[:1])  # of 0, 1 and 3
    down, x = method.server_send(server, torch.tensor(0)), data.test.x[:3]
    assert torch.equal(method.client_predict(model, clients.states[1], down, x), model(clients.states[1].inherited, x))
    assert torch.equal(method.client_predict(model, clients.states[2], down, x), model(server.weights, x))


def test_a_discrepancy_by_hand() -> None:
    """Points 0 and 1: the mean squared distance is 1, so the kernels give Σ exp(-2^p) at distance 1, and 5 at 0."""
    e = sum(torch.exp(torch.tensor(-(2.0**p), dtype=torch.float64)) for p in (-2, -1, 0, 1, 2))
    zero, one = torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    torch.testing.assert_close(discrepancy(zero, one, None), 5 + 5 - 2 * e)


def test_padding_and_equal_rows() -> None:
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randn(4, 3, generator=draw, dtype=torch.float64) for _ in range(2))
    longer = [torch.cat([t, 100 * torch.ones(2, 3, dtype=torch.float64)]) for t in (a, b)]
    real = torch.tensor([True] * 4 + [False] * 2)
    torch.testing.assert_close(discrepancy(*longer, real), discrepancy(a, b, None), rtol=1e-10, atol=1e-14)
    same = a[:1].expand(3, 3).clone().requires_grad_()
    value = discrepancy(same, same.detach(), None)
    value.backward()
    assert float(value.detach()) == 0
    assert same.grad is not None
    assert not same.grad.any()


@pytest.mark.parametrize("kind", ["regression", "multi-label", "segmentation", "next-token"])
def test_outputs_need_one_class_per_sample(kind: str) -> None:
    data, model = toy.of_task(kind)
    with pytest.raises(CoterieError, match="needs one class per sample; use by=features"):
        Looped(toy.method("fedphp", by="outputs"), model, data, 7, processes=1).rehearse()


def test_outputs_stacked_equal_looped() -> None:
    method = toy.method("fedphp", by="outputs")
    expected, _ = toy.looped(method, toy.model(), toy.toy())
    found, _ = toy.outcome(Stacked(method, toy.model(), toy.toy(), 7))
    assert toy.distance(expected, found) < 1e-10
