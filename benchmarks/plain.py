"""The baseline: a plain loop with a module per client, torch's optimizer, and lists of features by label.

It keeps the participants' data as ready tensors on the device, holds modules only for the clients of one round, and
neither augments images nor solves quadratic programs, so it does less work than Coterie or other libraries.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.machine import synchronize
from benchmarks.neighbour import serve
from benchmarks.workloads import Workload, data, make, network, participants, passes
from coterie.core.data import FederatedData, Transform
from coterie.models import Network

SHARED = {"fedpac": "encoder.", "fedper": "encoder.", "local": None}  # names that are averaged; others: all


@dataclass
class Client:
    x: Tensor  # (n, ...) normalized
    y: Tensor
    net: Network
    passes: tuple[int, ...]  # samples per pass of an epoch
    frozen: frozenset[int] = frozenset()  # ids of the parameters that are not trained
    prototypes: dict[int, Tensor] = field(default_factory=dict)


class Loop:
    def __init__(self, w: Workload, device: str) -> None:
        held = data(w)
        self.method: Any = make(w)
        self.shared = SHARED.get(w.method, "")
        net = network(w, held).to(device)
        self.trained = {name for name, p in net.named_parameters() if p.requires_grad}
        self.clients = [make_client(w, held, i, net) for i in participants(w)]

    def round(self) -> dict[str, float]:
        """Seconds by phase; `steps` is training without FedPAC's steps of the head."""
        self.seconds = dict.fromkeys(("statistics", "head", "steps", "aggregation"), 0.0)
        synchronize()
        start, cpu = time.perf_counter(), time.process_time()
        self.now = start
        for client in self.clients:
            if self.method.title == "FedPAC":
                self.fedpac(client)
            else:
                self.train(client, client.net.parameters(), self.method.train.lr)
                self.note("steps")
        self.average()
        self.note("aggregation")
        return {"round": time.perf_counter() - start, "cpu": time.process_time() - cpu, **self.seconds}

    def note(self, phase: str) -> None:
        """Add the time since the last call to this phase."""
        synchronize()
        before, self.now = self.now, time.perf_counter()
        self.seconds[phase] += self.now - before

    def fedpac(self, client: Client) -> None:
        client.prototypes, _ = class_means(client, self.method.train.batch_size)
        self.note("statistics")
        self.train(client, client.net.head.parameters(), self.method.head_lr, self.method.head_epochs)
        self.note("head")
        self.train(client, client.net.encoder.parameters(), self.method.train.lr, align=True)
        self.note("steps")
        class_means(client, self.method.train.batch_size)
        self.note("statistics")

    def train(
        self,
        client: Client,
        trained: Iterator[nn.Parameter],
        lr: float,
        epochs: int | None = None,
        align: bool = False,
    ) -> None:
        sgd, parts = self.method.train, [p for p in trained if id(p) not in client.frozen]
        client.net.requires_grad_(False)
        for p in parts:
            p.requires_grad_(True)
        optimizer = torch.optim.SGD(parts, lr=lr, momentum=sgd.momentum, weight_decay=sgd.weight_decay)
        for _ in range(sgd.local_epochs if epochs is None else epochs):
            for index in batches(client, sgd.batch_size, sgd.drop_last):
                optimizer.zero_grad()
                x, y = client.x[index], client.y[index]
                z = client.net.encoder(x)
                loss = F.cross_entropy(client.net.head(z).movedim(-1, 1), y)
                if align:
                    loss = loss + F.mse_loss(z, torch.stack([client.prototypes[k] for k in y.tolist()]))
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()

    def average(self) -> None:
        if self.shared is None:
            return
        states = [client.net.state_dict() for client in self.clients]
        moved = self.trained | {n for n, _ in self.clients[0].net.named_buffers()}
        shared = [n for n in states[0] if n.startswith(self.shared) and n in moved]
        mean = {n: torch.stack([s[n] for s in states]).mean(0) for n in shared}
        for client in self.clients:
            client.net.load_state_dict(mean, strict=False)


def make_client(w: Workload, held: FederatedData, number: int, net: nn.Module) -> Client:
    """net: the network that clients copy, except for its frozen weights, which they share."""
    x, y = held.train.client(number)
    frozen = {id(p): p for p in net.parameters() if not p.requires_grad}
    own = copy.deepcopy(net, dict(frozen))
    assert isinstance(own, Network)
    device = next(net.parameters()).device
    ready = (normalised(x, held.transform) if x.ndim == 4 else x).to(device)
    return Client(ready, y.to(device), own, passes(w, held)[number], frozenset(frozen))


def normalised(x: Tensor, how: Transform) -> Tensor:
    shares = x.float() / 255
    if not how.mean:
        return shares
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (how.mean, how.std))
    return (shares - mean) / std


def batches(client: Client, size: int, drop_last: bool = False) -> Iterator[Tensor]:
    n, device = len(client.y), client.y.device
    for length in client.passes:
        chosen = torch.randperm(n) if length == n else torch.randint(0, n, (length,))
        for index in chosen.to(device).split(size):  # type: ignore[no-untyped-call]
            if len(index) == size or not drop_last:
                yield index


def class_means(client: Client, size: int) -> tuple[dict[int, Tensor], dict[int, float]]:
    """Class means and mean squared norms, collected sample by sample."""
    features: dict[int, list[Tensor]] = {}
    with torch.no_grad():
        for index in batches(client, size):
            z = client.net.encoder(client.x[index])
            for row, label in zip(z, client.y[index].tolist(), strict=True):
                features.setdefault(label, []).append(row)
    means = {k: torch.stack(rows).mean(0) for k, rows in features.items()}
    squares = {k: float(torch.stack([row @ row for row in rows]).mean()) for k, rows in features.items()}
    return means, squares


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(Loop(Workload.read(sys.argv[1]), sys.argv[2]).round)
