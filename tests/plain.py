"""What the second implementations in tests/methods share: torch's modules and optimiser, one batch after the other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from coterie.core import random
from coterie.core.data import FederatedData, Split
from coterie.core.method import AnyMethod
from coterie.core.model import Model, Weights, make_model
from coterie.core.tasks import Regression
from coterie.core.training import LocalTraining
from coterie.execution import Looped, Turn
from coterie.execution.requests import keys, send
from tests import toy

SEED = 5
ROUNDS = (  # who takes part, and a learning rate that falls
    ([0, 1, 3], Turn(0)),
    ([1, 2, 4], Turn(1, 0.5)),
    ([0, 2, 3], Turn(2, 0.25)),
)


def data() -> FederatedData:
    """Ragged clients; some batches are not full."""
    return toy.toy(train=(13, 20, 9, 31, 8), augmented=False)


def batches(data: FederatedData, client: int, turn: Turn, sgd: LocalTraining) -> list[tuple[Tensor, Tensor]]:
    """All batches of a client in a round, normalised. Their order is data, so it is taken from where it is made."""
    x, y = data.train.client(client)
    x = (x.double() / 255 - 0.5) / 0.5 if x.dtype == torch.uint8 else x
    key, found = keys(SEED, turn, torch.tensor(client)), []
    for epoch in range(sgd.local_epochs):
        shuffled = random.shuffle(random.derive(key, random.SHUFFLE, epoch), len(y))
        chunks = [
            index
            for index in torch.split(shuffled, sgd.batch_size)
            if len(index) == sgd.batch_size or not sgd.drop_last
        ]
        found += [(x[index], y[index]) for index in chunks]
    return found


def optimiser(parameters: Iterable[nn.Parameter], sgd: LocalTraining, turn: Turn, momentum: float | None = None) -> Any:
    speed = sgd.momentum if momentum is None else momentum
    return torch.optim.SGD(parameters, lr=sgd.lr * turn.rate, momentum=speed, weight_decay=sgd.weight_decay)


def copy(net: nn.Module) -> dict[str, Tensor]:
    """Everything in a network, BatchNorm's statistics included."""
    return {n: t.clone() for n, t in net.state_dict().items() if not n.endswith("num_batches_tracked")}


def mean(models: Sequence[dict[str, Tensor]], weights: Sequence[float]) -> dict[str, Tensor]:
    return {n: sum(w / sum(weights) * m[n] for m, w in zip(models, weights, strict=True)) for n in models[0]}  # type: ignore[misc]


def named(weights: Weights, net: nn.Module) -> dict[str, Tensor]:
    """Our weights under the names of the network: the head is its last module."""
    return {**weights.encoder, **{f"{len(net) - 1}.{n}": t for n, t in weights.head.items()}}  # type: ignore[arg-type]


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11, msg=lambda text, n=name: f"{n}: {text}")


def federation(
    method: AnyMethod,
    data: FederatedData,
    model: Model,
    rounds: Iterable[tuple[list[int], Turn]] = ROUNDS,
) -> tuple[Any, Looped]:
    """The server after these rounds, and the clients."""
    clients = Looped(method, model, data, SEED, processes=1)
    server = method.server_init(clients.model, clients.census)
    clients.join(method.server_welcome(server))
    for joined, turn in rounds:
        ids = torch.tensor(joined)
        answers = clients.train(ids, send(method, server, ids), turn)
        server = method.server_receive(server, answers.clients, answers.ups)
        server = method.server_train(clients.model, server, random.server_key(SEED, turn.round))
    return server, clients


def class_means(net: Any, data: FederatedData, i: int) -> dict[int, Tensor]:
    """Class -> mean of the features of a client's training samples; the head is the last module."""
    x, y = data.train.client(i)
    with torch.no_grad():
        z = net[:-1]((x.double() / 255 - 0.5) / 0.5)
    return {k: z[y == k].mean(0) for k in y.unique().tolist()}


def server_batches(
    sent: Sequence[dict[int, Tensor]], turn: Turn, epochs: int, size: int
) -> Iterable[tuple[Tensor, Tensor]]:
    """Batches of class means and their classes that a server trains on; sent: by class, for each participant."""
    places = [k in means for means in sent for k in range(toy.CLASSES)]
    for epoch in range(epochs):
        key = random.derive(random.server_key(SEED, turn.round), random.SHUFFLE, epoch)
        order = random.shuffle(key, len(places), torch.tensor(places))[: sum(places)]
        for part in torch.split(order, size):
            pairs = [(sent[at // toy.CLASSES][at % toy.CLASSES], at % toy.CLASSES) for at in part.tolist()]
            yield torch.stack([z for z, _ in pairs]), torch.tensor([k for _, k in pairs])


def line(clients: int = 3, samples: int = 12) -> tuple[FederatedData, Model]:
    """A convex problem: softmax regression on 3 features, every client with labels of another mixture."""
    draw = torch.Generator().manual_seed(1)
    n = clients * samples
    x = torch.randn(n, 3, generator=draw, dtype=torch.float64)
    owner = torch.arange(n) // samples
    y = torch.where(torch.rand(n, generator=draw) < 0.7, owner % 2, torch.randint(0, 2, (n,), generator=draw))
    held = Split(x, y, (samples,) * clients)
    network = nn.Sequential(nn.Flatten(), nn.Linear(3, 2))
    with torch.no_grad():
        network[1].weight.zero_()
        network[1].bias.zero_()
    return FederatedData("line", 2, held, held), make_model(network, (3,), 2).to("cpu", torch.float64)


def parabolas(
    start: Sequence[float] = (1.0,), targets: Sequence[float] = (0.0, 3.0), samples: tuple[int, ...] = (1, 3)
) -> tuple[FederatedData, Model]:
    """Client i has the loss (w_1 - y_i)² on each of its samples, with y_i its target. w: the head, from this start."""
    x = torch.zeros(sum(samples), len(start), dtype=torch.float64)
    x[:, 0] = 1.0
    y = torch.tensor(targets, dtype=torch.float64).repeat_interleave(torch.tensor(samples))[:, None]
    held = Split(x, y, samples)
    network = nn.Sequential(nn.Flatten(), nn.Linear(len(start), 1, bias=False)).double()
    with torch.no_grad():
        network[1].weight.copy_(torch.tensor([list(start)]))
    model = make_model(network, (len(start),), Regression(1), label=(1,)).to("cpu", torch.float64)
    return FederatedData("parabolas", 0, held, held, task=Regression(1)), model


def slope(weights: Weights, data: FederatedData, decay: float) -> float:
    """Norm of the gradient of the mean of all clients' losses: zero at the optimum of all."""
    w, b = (weights.head[n].clone().requires_grad_() for n in ("weight", "bias"))
    loss = nn.functional.cross_entropy(data.train.x @ w.T + b, data.train.y)
    loss = loss + decay / 2 * (w.square().sum() + b.square().sum())
    return float(torch.cat([g.flatten() for g in torch.autograd.grad(loss, (w, b))]).norm())


def locally(
    weights: dict[str, Tensor], data: FederatedData, i: int, turn: Turn, sgd: LocalTraining
) -> dict[str, Tensor]:
    """A client's network after a round of local training on cross entropy, from these weights."""
    net = toy.network(any("running" in name for name in weights)).double()
    net.load_state_dict(weights, strict=False)
    optimizer = optimiser(net.parameters(), sgd, turn)
    for x, y in batches(data, i, turn, sgd):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return copy(net)


def mean_loss(weights: dict[str, Tensor], data: FederatedData, i: int) -> float:
    """Of these weights on all training samples of a client, in evaluation mode."""
    net = toy.network(any("running" in name for name in weights)).double().eval()
    net.load_state_dict(weights, strict=False)
    x, y = data.train.client(i)
    with torch.no_grad():
        return float(nn.functional.cross_entropy(net((x.double() / 255 - 0.5) / 0.5), y))
