"""LG-FedAvg against a loop with modules, and at its two ends: nothing personal, nothing shared."""

from __future__ import annotations

import torch.nn.functional as F

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
    plain.assert_close(server.shared.head, head)
    for i, net in enumerate(nets):
        plain.assert_close(clients.states[i].personal.encoder, plain.copy(net[:-1]))  # type: ignore[index]
