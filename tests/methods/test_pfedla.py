"""pFedLA against modules, torch's autograd and loops over layers and clients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from coterie.core import tree
from coterie.core.training import LocalTraining
from coterie.execution import Turn
from coterie.methods.pfedla import Server, Up, pFedLA, shares
from tests import plain, toy

SGD = LocalTraining(local_epochs=2, batch_size=8, lr=0.05, momentum=0.5, weight_decay=1e-3)
LAYERS = ("0", "4", "6")  # of the toy network, in the order of its tensors


def layer(name: str) -> int:
    return LAYERS.index(name.rpartition(".")[0])


class Plain:
    """Every client's embedding and hypernetwork are leaves of torch's autograd."""

    def __init__(self, begun: Server, rate: float) -> None:
        self.data, self.rate = plain.data(), rate
        start = plain.copy(toy.network().double())
        self.models = [dict(start) for _ in range(5)]
        self.hyper = [[t.clone().requires_grad_() for t in tree.pick(begun.hyper, i)] for i in range(5)]

    def weights(self, i: int) -> Tensor:
        embedding, hidden, hidden_bias, out, out_bias = self.hyper[i]
        h = torch.relu(hidden @ embedding + hidden_bias)
        return torch.stack([torch.softmax(out[k] @ h + out_bias[k], 0) for k in range(len(LAYERS))])

    def mixed(self, i: int) -> dict[str, Tensor]:
        alpha = self.weights(i)
        return {n: sum(alpha[layer(n), j] * self.models[j][n] for j in range(5)) for n in self.models[0]}  # type: ignore[misc]

    def round(self, joined: list[int], turn: Turn) -> None:
        sent = {i: self.mixed(i) for i in joined}
        trained = {}
        for i in joined:
            trained[i] = plain.locally({n: t.detach() for n, t in sent[i].items()}, self.data, i, turn, SGD)
            inner = sum((t * (t.detach() - trained[i][n])).sum() for n, t in sent[i].items())
            slopes = torch.autograd.grad(inner, self.hyper[i])  # type: ignore[arg-type]
            stepped = zip(self.hyper[i], slopes, strict=True)
            self.hyper[i] = [(t - self.rate * g).detach().requires_grad_() for t, g in stepped]
        for i in joined:
            self.models[i] = trained[i]


@pytest.mark.parametrize("own", [1.0, 0.0])
def test_three_rounds_equal_the_plain_implementation(own: float) -> None:
    """Everyone's models of the last round stand in the means, not those of this one."""
    method = pFedLA(train=SGD, server_lr=0.5, own=own, embedding_size=3, hidden_units=4)
    begun, _ = plain.federation(method, plain.data(), toy.model(), [])
    expected = Plain(begun, 0.5)
    for joined, turn in plain.ROUNDS:
        expected.round(joined, turn)
    server, _ = plain.federation(method, plain.data(), toy.model())
    net = toy.network()
    for i in range(5):
        found = plain.named(method.server_send(server, torch.tensor(i)).weights, net)
        plain.assert_close(found, {n: t.detach() for n, t in expected.mixed(i).items()})
        for ours, theirs in zip(tree.pick(server.hyper, i), expected.hyper[i], strict=True):
            torch.testing.assert_close(ours, theirs.detach(), rtol=1e-9, atol=1e-11)
    assert float((method.server_report(server)["shares"] - method.server_report(begun)["shares"]).abs().max()) > 1e-5


def test_two_clients_by_hand() -> None:
    """With outputs of zero, client 0 weights itself by e / (e + 1) and the other by 1 / (e + 1), in every layer."""
    method = pFedLA(train=SGD)
    server, _ = plain.federation(method, toy.toy(train=(3, 3), test=(1, 1)), toy.model(), [])
    models = tree.apply(lambda t: torch.stack([torch.zeros_like(t[0]), torch.ones_like(t[0])]), server.models)
    e = torch.e
    for client, expected in ((0, 1 / (e + 1)), (1, e / (e + 1))):
        sent = method.server_send(server._replace(models=models), torch.tensor(client))
        for t in tree.leaves(sent):
            torch.testing.assert_close(t, torch.full_like(t, expected))


def test_a_huge_own_logit_is_local_training() -> None:
    """Every client then receives its own last model."""
    found, _ = plain.federation(pFedLA(train=SGD.but(momentum=0.0), own=60.0), plain.data(), toy.model())
    local: Any = [plain.copy(toy.network().double()) for _ in range(5)]
    for joined, turn in plain.ROUNDS:
        for i in joined:
            local[i] = plain.locally(local[i], plain.data(), i, turn, SGD.but(momentum=0.0))
    for i in range(5):
        plain.assert_close(plain.named(tree.pick(found.models, i), toy.network()), local[i])


def test_a_client_that_did_not_move_changes_nothing() -> None:
    method = pFedLA(train=SGD, server_lr=9.0)
    server, _ = plain.federation(method, plain.data(), toy.model())
    sent = tree.stack([method.server_send(server, torch.tensor(i)).weights for i in (1, 3)])
    after = method.server_receive(server, torch.tensor([1, 3]), Up(sent))
    toy.assert_same(tree.flatten(after.hyper), tree.flatten(server.hyper))
    for i in (0, 2, 4):
        toy.assert_same(tree.flatten(tree.pick(after.models, i)), tree.flatten(tree.pick(server.models, i)))


def test_the_step_lowers_the_distance_to_the_trained_model() -> None:
    """Client 0 trained to the model of client 1: its weight of client 1 rises in every layer."""
    method = pFedLA(train=SGD, server_lr=0.1, embedding_size=2, hidden_units=3)
    server, _ = plain.federation(method, toy.toy(train=(3, 3), test=(1, 1)), toy.model(), [])
    models = tree.apply(lambda t: torch.stack([t[0], t[0] + 1]), server.models)
    server = server._replace(models=models)
    after = method.server_receive(server, torch.tensor([0]), Up(tree.pick(models, torch.tensor([1]))))
    before, now = (shares(tree.pick(s.hyper, 0)) for s in (server, after))
    assert (now[:, 1] > before[:, 1]).all()


def test_a_newcomer_gets_the_mean() -> None:
    method = pFedLA(train=SGD)
    server, _ = plain.federation(method, plain.data(), toy.model())
    plain.assert_close(
        tree.flatten(method.server_greet(server).weights), tree.flatten(tree.average(server.models, torch.ones(5)))
    )
