"""pFedHN against a hypernetwork of modules, with torch's autograd, clipping and optimiser."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.core import tree
from coterie.core.data import FederatedData
from coterie.core.training import LocalTraining
from coterie.execution import Turn
from coterie.methods.pfedhn import Server, Up, pFedHN
from tests import plain, toy

SGD = LocalTraining(
    local_epochs=2, batch_size=8, lr=0.05, momentum=0.3, weight_decay=0.7
)  # neither of the last two may count


class Hyper(nn.Module):
    """As the authors build it: embeddings, a perceptron, one Linear for each tensor of the network."""

    def __init__(self, server: Server, net: nn.Module) -> None:
        super().__init__()
        ours = server.hyper
        embeddings = ours.embedding.clone()
        self.embeddings = nn.ParameterList([nn.Parameter(row) for row in embeddings])
        layers: list[nn.Module] = [nn.Linear(embeddings.shape[1], 100)]
        for _ in range(3):
            layers += [nn.ReLU(), nn.Linear(100, 100)]
        self.mlp = nn.Sequential(*layers).double()
        self.shapes = {name: p.shape for name, p in net.named_parameters()}
        self.outputs = nn.ModuleList([nn.Linear(100, shape.numel()).double() for shape in self.shapes.values()])
        basis, bias = plain.named(ours.basis, net), plain.named(ours.bias, net)
        with torch.no_grad():
            for number, linear in enumerate(m for m in self.mlp if isinstance(m, nn.Linear)):
                linear.weight.copy_(ours.layers[f"{number}.weight"])
                linear.bias.copy_(ours.layers[f"{number}.bias"])
            for name, output in zip(self.shapes, self.outputs, strict=True):
                output.weight.copy_(basis[name].flatten(1).T)  # type: ignore[operator]
                output.bias.copy_(bias[name].flatten())  # type: ignore[operator]

    def forward(self, client: int) -> dict[str, Tensor]:
        h = self.mlp(self.embeddings[client])
        found = zip(self.shapes.items(), self.outputs, strict=True)
        return {name: output(h).view(shape) for (name, shape), output in found}


def local_training(weights: dict[str, Tensor], i: int, turn: Turn, data: FederatedData, method: pFedHN) -> Any:
    net = toy.network().double()
    net.load_state_dict(weights)
    sgd = method.train.but(momentum=method.client_momentum, weight_decay=method.client_decay)
    optimiser = plain.optimiser(net.parameters(), sgd, turn)
    for x, y in plain.batches(data, i, turn, sgd):
        optimiser.zero_grad()
        F.cross_entropy(net(x), y).backward()
        nn.utils.clip_grad_norm_(net.parameters(), method.largest_norm)
        optimiser.step()
    return plain.copy(net)


def started(method: pFedHN, data: FederatedData) -> Server:
    server, _ = plain.federation(method, data, toy.model(), rounds=())
    assert isinstance(server, Server)
    return server


@pytest.mark.parametrize("largest_norm", [50.0, 0.2], ids=["clip50", "clip"])
def test_three_rounds_equal_the_plain_implementation(largest_norm: float) -> None:
    """Models are made before the round; then one step of the server for each participant, in turn."""
    method, data, net = pFedHN(train=SGD, largest_norm=largest_norm), plain.data(), toy.network()
    hyper = Hyper(started(method, data), net)
    parameters = list(hyper.parameters())
    optimiser = torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=1e-3)
    for joined, turn in plain.ROUNDS:
        sent = [{n: t.detach().clone() for n, t in hyper(i).items()} for i in joined]
        trained = [local_training(w, i, turn, data, method) for w, i in zip(sent, joined, strict=True)]
        for i, after in zip(joined, trained, strict=True):
            made = hyper(i)
            deltas = [made[n].detach() - after[n] for n in made]
            slopes = torch.autograd.grad(list(made.values()), parameters, deltas, allow_unused=True)
            for p, slope in zip(parameters, slopes, strict=True):
                p.grad = slope  # None for the embeddings of others: torch's optimiser leaves them alone
            nn.utils.clip_grad_norm_(parameters, largest_norm)
            optimiser.step()
    server, _ = plain.federation(method, data, toy.model())
    for i in range(5):
        found = plain.named(method.server_send(server, torch.tensor(i)).weights, net)
        plain.assert_close(found, {n: t.detach() for n, t in hyper(i).items()})
        torch.testing.assert_close(server.hyper.embedding[i], hyper.embeddings[i].detach())
    assert toy.distance(tree.flatten(server.hyper.layers), tree.flatten(started(method, data).hyper.layers)) > 1e-4


@pytest.mark.long
def test_many_who_agree_do_not_push_farther_than_one() -> None:
    """Twenty clients trained the same model: the hypernetwork goes to it, and not twenty times as far."""
    method, data = pFedHN(train=SGD), toy.toy(train=(3,) * 20, test=(1,) * 20)
    server, everyone = started(method, data), torch.arange(20)
    target = tree.apply(lambda t: t + 0.3, toy.model().start)
    ups = Up(tree.apply(lambda t: t.expand(20, *t.shape), target))
    gaps = []
    for _ in range(15):
        server = method.server_receive(server, everyone, ups)
        made = method.server_send(server, torch.tensor(7)).weights
        gaps.append(toy.distance(tree.flatten(made), tree.flatten(target)))
    assert gaps[-1] < 0.1 * gaps[0]
    assert max(gaps) < 2


@pytest.mark.parametrize(("clients", "length"), [(5, 2), (8, 3), (20, 6), (100, 26)])
def test_embeddings_have_the_length_of_the_authors(clients: int, length: int) -> None:
    """int(1 + m / 4), not int((1 + m) / 4) as elsewhere."""
    method, data = pFedHN(train=SGD), toy.toy(train=(3,) * clients, test=(1,) * clients)
    assert started(method, data).hyper.embedding.shape == (clients, length)


def test_who_never_takes_part_keeps_its_embedding() -> None:
    """No decay and no momentum reach it, though its model follows the hypernetwork."""
    method, data = pFedHN(train=SGD, server_decay=0.5), plain.data()
    rounds = [([0, 1], Turn(0)), ([1, 3], Turn(1))]
    server, _ = plain.federation(method, data, toy.model(), rounds)
    before = started(method, data)
    for i in range(5):
        assert torch.equal(server.hyper.embedding[i], before.hyper.embedding[i]) == (i in (2, 4))
    made = [tree.flatten(method.server_send(s, torch.tensor(4)).weights) for s in (before, server)]
    assert toy.distance(*made) > 1e-6


def test_a_client_that_did_not_move_only_decays_the_hypernetwork() -> None:
    """Δ = 0: all that is left of the step is weight decay, w - lr * decay * w."""
    method, data = pFedHN(train=SGD, server_lr=0.1, server_decay=0.2), plain.data()
    server = started(method, data)
    sent = method.server_send(server, torch.tensor(2)).weights
    after = method.server_receive(server, torch.tensor([2]), Up(tree.apply(lambda t: t[None], sent)))
    for name, t in tree.items(server.hyper.layers):
        torch.testing.assert_close(tree.flatten(after.hyper.layers)[name], t * (1 - 0.1 * 0.2))
    torch.testing.assert_close(after.hyper.embedding[2], server.hyper.embedding[2] * (1 - 0.1 * 0.2))


def test_the_step_of_the_server_is_clipped() -> None:
    """Over the hypernetwork and the embedding together."""
    method = pFedHN(train=SGD, server_lr=2.0, server_momentum=0.0, server_decay=0.0, largest_norm=0.01)
    server = started(method, plain.data())
    zeros = tree.apply(torch.zeros_like, tree.stack([method.server_send(server, torch.tensor(2)).weights]))
    after = method.server_receive(server, torch.tensor([2]), Up(zeros))  # Δ is the whole model
    moved = tree.leaves(tree.apply(torch.sub, after.hyper, server.hyper))
    assert sum(float(t.square().sum()) for t in moved) ** 0.5 == pytest.approx(2.0 * 0.01, rel=1e-3)


def test_another_seed_gives_another_hypernetwork() -> None:
    data = plain.data()
    first, same, other = (started(pFedHN(train=SGD, hyper_seed=s), data).hyper for s in (0, 0, 1))
    toy.assert_same(tree.flatten(first), tree.flatten(same))
    assert toy.distance(tree.flatten(first), tree.flatten(other)) > 0.1


def test_batch_norm_statistics_are_averaged_not_made() -> None:
    method, data, model = pFedHN(train=SGD), plain.data(), toy.model(batch_norm=True)
    server, clients = plain.federation(method, data, model, rounds=())
    names = [n for n, _ in tree.items(server.hyper.basis)]
    assert not any("running" in n for n in names)
    assert "encoder.1.weight" in names
    ids = torch.tensor([1, 3])
    answers: Any = clients.train(ids, torch.func.vmap(lambda i: method.server_send(server, i))(ids), Turn(0))
    after = method.server_receive(server, ids, answers.ups)
    n, found = data.train.sizes, answers.ups.weights.encoder["1.running_mean"]
    expected = (n[1] * found[0] + n[3] * found[1]) / (n[1] + n[3])
    sent = method.server_send(after, torch.tensor(0)).weights.encoder["1.running_mean"]
    torch.testing.assert_close(sent, expected)
    assert expected.abs().max() > 1e-3


def test_a_newcomer_gets_what_the_mean_embedding_makes() -> None:
    method, data, net = pFedHN(train=SGD), plain.data(), toy.network()
    server = started(method, data)
    hyper = Hyper(server, net)
    with torch.no_grad():
        hyper.embeddings[0].copy_(server.hyper.embedding.mean(0))
    plain.assert_close(
        plain.named(method.server_greet(server).weights, net), {n: t.detach() for n, t in hyper(0).items()}
    )
