"""LG-FedAvg against a loop with modules, and at its two ends: nothing personal, nothing shared."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.core import tree
from coterie.core.model import Model, make_model
from coterie.core.training import LocalTraining
from coterie.methods.lg_fedavg import LGFedAvg
from tests import plain, toy

SGD = LocalTraining(local_epochs=2, batch_size=8, lr=0.05, momentum=0.5, weight_decay=1e-3)


def test_three_rounds_equal_the_plain_implementation() -> None:
    """Heads travel and are averaged by samples; encoders stay, also those of clients that sit out (elsewhere the first
    layers travel)."""
    data = plain.data()
    nets = [toy.network().double() for _ in range(data.num_clients)]
    head = plain.copy(toy.network().double()[-1])  # type: ignore[index]
    for joined, turn in plain.ROUNDS:
        for i in joined:
            nets[i][-1].load_state_dict(head)  # type: ignore[index]
            optimiser = plain.optimiser(nets[i].parameters(), SGD, turn)
            for x, y in plain.batches(data, i, turn, SGD):
                optimiser.zero_grad()
                F.cross_entropy(nets[i](x), y).backward()
                optimiser.step()
        head = plain.mean([plain.copy(nets[i][-1]) for i in joined], [data.train.sizes[i] for i in joined])  # type: ignore[index]
    server, clients = plain.federation(LGFedAvg(train=SGD), data, toy.model())
    plain.assert_close(server.head, head)
    for i, net in enumerate(nets):
        plain.assert_close(clients.state(i).encoder, plain.copy(net[:-1]))  # type: ignore[index]


class Ends(nn.Module):
    """A network of these two."""

    def __init__(self, encoder: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = encoder, head

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(x))
        return out


def model(network: nn.Module) -> Model:
    return make_model(network, toy.SHAPE, toy.CLASSES, toy.toy().transform).to("cpu", torch.float64)


def part(found: tree.Tree, prefix: str) -> tree.Tree:
    return {name.removeprefix(prefix): t for name, t in found.items() if name.startswith(prefix)}


def test_with_all_layers_shared_it_is_fedavg() -> None:
    shared = model(Ends(nn.Flatten(), nn.Sequential(nn.Unflatten(1, toy.SHAPE), toy.network())))
    found, _ = toy.looped(toy.method("lg-fedavg"), shared, toy.toy())
    averaged, _ = toy.looped(toy.method("fedavg"), shared, toy.toy())
    toy.assert_same(part(found, "server.head."), part(averaged, "server.weights.head."))
    assert not part(found, "states.0.encoder.")


def test_with_no_layer_shared_it_is_local() -> None:
    alone = toy.headless()
    found, _ = toy.looped(toy.method("lg-fedavg"), alone, toy.toy())
    local, _ = toy.looped(toy.method("local"), alone, toy.toy())
    for i in range(5):
        toy.assert_same(part(found, f"states.{i}.encoder."), part(local, f"states.{i}.weights.encoder."))
