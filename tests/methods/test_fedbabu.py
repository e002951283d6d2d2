"""FedBABU against a loop with modules whose head no optimiser knows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from coterie.core import tree
from coterie.core.data import FederatedData
from coterie.core.errors import CoterieError
from coterie.core.model import Weights
from coterie.core.training import LocalTraining
from coterie.execution import Looped, Turn
from coterie.execution.requests import send
from coterie.federation import Settings, federate
from coterie.methods.fedbabu import FedBABU
from tests import plain, toy

SGD = LocalTraining(local_epochs=2, batch_size=8, lr=0.05, momentum=0.5, weight_decay=0.1)  # a visible decay
LAST = Turn(3, 0.25)


def train(net: nn.Module, part: nn.Module, data: FederatedData, i: int, turn: Turn, sgd: LocalTraining) -> None:
    optimiser = plain.optimiser(part.parameters(), sgd, turn)
    for x, y in plain.batches(data, i, turn, sgd):
        optimiser.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimiser.step()


def plain_encoder(data: FederatedData) -> dict[str, torch.Tensor]:
    encoder = plain.copy(toy.network().double()[:-1])  # type: ignore[index]
    for joined, turn in plain.ROUNDS:
        models = []
        for i in joined:
            net = toy.network().double()
            net[:-1].load_state_dict(encoder)  # type: ignore[index]
            train(net, net[:-1], data, i, turn, SGD)  # type: ignore[index]
            models.append(plain.copy(net[:-1]))  # type: ignore[index]
        encoder = plain.mean(models, [data.train.sizes[i] for i in joined])
    return encoder


@pytest.mark.parametrize(("finetune", "epochs"), [("full", None), ("full", 3), ("head", 3), ("encoder", 2)])
def test_rounds_and_fine_tuning_equal_the_plain_implementation(finetune: str, epochs: int | None) -> None:
    data = plain.data()
    method = FedBABU(train=SGD, finetune=finetune, finetune_epochs=epochs)
    server, clients = plain.federation(method, data, toy.model())
    encoder = plain_encoder(data)
    plain.assert_close(server.encoder, encoder)
    clients.finish(torch.arange(5), send(method, server, torch.arange(5)), LAST)
    for i in range(5):
        net = toy.network().double()
        net[:-1].load_state_dict(encoder)  # type: ignore[index]
        tuned = {"full": net, "head": net[-1], "encoder": net[:-1]}[finetune]  # type: ignore[index]
        train(net, tuned, data, i, LAST, SGD.but(local_epochs=epochs or SGD.local_epochs))
        plain.assert_close(plain.named(clients.states[i].tuned, net), plain.copy(net))


def test_the_head_stays_as_it_was_drawn() -> None:
    """No weight decay and no momentum reach it: before fine-tuning, everybody predicts with the first head."""
    model, data = toy.model(), plain.data()
    method = FedBABU(train=SGD)
    server, clients = plain.federation(method, data, model)
    x, start = data.test.x[:6], toy.model().start
    assert toy.distance(server.encoder, start.encoder) > 1e-3
    expected = model(Weights(server.encoder, start.head), x)
    down = method.server_send(server, torch.tensor(1))
    assert torch.equal(method.client_predict(model, clients.states[1], down, x), expected)
    assert torch.equal(method.server_predict(model, server, x), expected)


def test_fine_tuning_the_head_leaves_the_encoder() -> None:
    """Its BatchNorm too."""
    method, model = FedBABU(train=SGD, finetune="head"), toy.model(batch_norm=True)
    server, clients = plain.federation(method, plain.data(), model)
    clients.finish(torch.arange(5), send(method, server, torch.arange(5)), LAST)
    for i in range(5):
        toy.assert_same(clients.states[i].tuned.encoder, server.encoder)
        assert toy.distance(clients.states[i].tuned.head, model.start.head) > 1e-3


def test_fine_tuning_is_measured_beside_the_global_model_and_leaves_it() -> None:
    """One run gives both; without fine-tuning they are the same (a table elsewhere printed one for the other)."""
    servers = {}
    for finetune in ("full", "encoder", "head", "none"):
        clients = Looped(toy.method("fedbabu", finetune=finetune, lr=0.3), toy.model(), toy.toy(), 7, processes=1)
        server, history = federate(clients, Settings(rounds=2, seed=7))
        servers[finetune] = tree.flatten(server)
        shared, finished = history[-2].scores["global", "test"], history[-1].scores["finished", "test"]
        assert shared.loss.tolist() == history[-2].scores["pre", "test"].loss.tolist()
        assert (shared.loss.tolist() == finished.loss.tolist()) is (finetune == "none")
    toy.assert_same(servers["full"], servers["none"])
    toy.assert_same(servers["head"], servers["none"])


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(CoterieError, match="unknown part to fine-tune 'body': known: encoder, full, head, none"):
        FedBABU(finetune="body")


def test_the_whole_network_is_fine_tuned_by_default() -> None:
    """As in its paper; no protocol but FedReG's and FedCRC's says otherwise."""
    method, data = FedBABU(train=SGD), plain.data()
    server, clients = plain.federation(method, data, toy.model())
    downs = send(method, server, torch.arange(5))
    clients.finish(torch.arange(5), downs, LAST)
    tuned = clients.states[0].tuned
    start = toy.model().start
    assert all(not torch.equal(t, start.head[name]) for name, t in tuned.head.items())
    assert all(not torch.equal(t, server.encoder[name]) for name, t in tuned.encoder.items())
