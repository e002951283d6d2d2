"""One FedPAC round as it is usually written: a module per client, torch's optimiser, lists of features by label.

The loop that we compare with. It keeps the data as ready tensors in memory, so it spares itself the data loaders
that other libraries pay for.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Net(nn.Module):
    """The paper's network for images of 28 x 28, layer by layer as the paper lists it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 5), nn.Conv2d(16, 32, 5, padding=1)
        self.pool, self.act = nn.MaxPool2d(2), nn.LeakyReLU()
        self.fc1, self.fc2 = nn.Linear(800, 128), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.pool(self.act(self.conv1(x)))
        x = self.pool(self.act(self.conv2(x)))
        z = self.act(self.fc1(x.flatten(1)))
        return z, self.fc2(z)


@dataclass
class Client:
    x: Tensor
    y: Tensor
    net: Net
    prototypes: dict[int, Tensor] = field(default_factory=dict)


def batches(client: Client, size: int = 50) -> list[Tensor]:
    return list(torch.randperm(len(client.y)).split(size))  # type: ignore[no-untyped-call]


def class_means(client: Client) -> tuple[dict[int, Tensor], dict[int, float]]:
    """Class means and mean squared lengths, collected sample by sample."""
    features: dict[int, list[Tensor]] = {}
    with torch.no_grad():
        for index in batches(client):
            z, _ = client.net(client.x[index])
            for row, label in zip(z, client.y[index].tolist(), strict=True):
                features.setdefault(label, []).append(row)
    means = {k: torch.stack(rows).mean(0) for k, rows in features.items()}
    squares = {k: float(torch.stack([row @ row for row in rows]).mean()) for k, rows in features.items()}
    return means, squares


def train(client: Client, parts: list[nn.Parameter], lr: float, epochs: int, align: bool) -> None:
    for p in client.net.parameters():
        p.requires_grad_(False)
    for p in parts:
        p.requires_grad_(True)
    optimiser = torch.optim.SGD(parts, lr=lr, momentum=0.5, weight_decay=5e-4)
    for _ in range(epochs):
        for index in batches(client):
            optimiser.zero_grad()
            z, logits = client.net(client.x[index])
            loss = F.cross_entropy(logits, client.y[index])
            if align:
                target = torch.stack([client.prototypes[k] for k in client.y[index].tolist()])
                loss = loss + F.mse_loss(z, target)
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()


def fedpac_round(clients: list[Client]) -> dict[str, float]:
    """Statistics, head, encoder, centroids, and the mean of the encoders; seconds by phase. (No quadratic programs.)"""
    seconds = {"statistics": 0.0, "training": 0.0, "aggregation": 0.0}
    for client in clients:
        start = time.perf_counter()
        client.prototypes, _ = class_means(client)
        middle = time.perf_counter()
        head = [*client.net.fc2.parameters()]
        train(client, head, 0.1, 1, align=False)
        train(client, [p for p in client.net.parameters() if all(p is not q for q in head)], 0.01, 5, align=True)
        late = time.perf_counter()
        class_means(client)
        end = time.perf_counter()
        seconds["statistics"] += middle - start + end - late
        seconds["training"] += late - middle
    start = time.perf_counter()
    with torch.no_grad():
        mean = {n: torch.stack([c.net.state_dict()[n] for c in clients]).mean(0) for n in clients[0].net.state_dict()}
        for client in clients:
            client.net.load_state_dict({n: t for n, t in mean.items() if "fc2" not in n}, strict=False)
    seconds["aggregation"] = time.perf_counter() - start
    return seconds


def make_clients(x: Tensor, y: Tensor, sizes: tuple[int, ...]) -> list[Client]:
    net = Net()
    parts = zip(torch.split(x, list(sizes)), torch.split(y, list(sizes)), strict=True)
    return [Client(a.clone(), b.clone(), copy.deepcopy(net)) for a, b in parts]


def serve() -> None:
    """A round for every line of input, its seconds as the answer: a process that nothing of ours has tuned."""
    from benchmarks.__main__ import data  # the same samples; everything else here is torch

    torch.set_num_threads(1)
    held = data()
    x = (held.train.x.float() / 255 - 0.1307) / 0.3081
    clients = make_clients(x, held.train.y, held.train.sizes)
    print("ready", flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        seconds = fedpac_round(clients)
        print(json.dumps({"round": time.perf_counter() - start, **seconds}), flush=True)


if __name__ == "__main__":
    serve()
