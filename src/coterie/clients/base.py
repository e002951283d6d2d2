"""What the federated loop asks of clients, wherever they run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.core import order, tree
from coterie.core.errors import CoterieError
from coterie.core.method import Census, Method
from coterie.core.model import Model
from coterie.core.samples import FederatedData, Split

AnyMethod = Method[Any, Any, Any, Any]


class Turn(NamedTuple):
    """One round, as its clients need to know it."""

    round: int
    rate: float = 1.0  # factor on the learning rate


class Answers(NamedTuple):
    """What came back from training."""

    clients: Tensor  # (S,) ids of those whose answer can be used, ascending
    ups: Any  # one Up with a leading axis of S
    left_out: tuple[int, ...]  # ids of those whose answer was not finite; their state is as before


class Scores(NamedTuple):
    """How a model does on each client's samples. All (S,)."""

    clients: Tensor
    correct: Tensor
    total: Tensor
    loss: Tensor  # mean cross entropy

    @property
    def accuracy(self) -> Tensor:
        return self.correct / self.total.clamp_min(1)


class Clients(ABC):
    """All clients of a federation: their data and what they remember. Ids are ascending everywhere."""

    def __init__(self, method: AnyMethod, model: Model, data: FederatedData, seed: int) -> None:
        self.method, self.model, self.data, self.seed = method, model, data, seed
        check_batches(method, data)

    @property
    def census(self) -> Census:
        train = self.data.train
        return Census(torch.tensor(train.sizes), train.class_counts(self.data.classes))

    @abstractmethod
    def join(self, welcome: tree.Tree) -> None:
        """Every client makes its first state."""

    @abstractmethod
    def train(self, clients: Tensor, downs: Any, turn: Turn) -> Answers:
        """These clients train with their row of downs; those with a finite answer keep their new state."""

    @abstractmethod
    def finish(self, clients: Tensor, downs: Any, turn: Turn) -> None:
        """The last thing that these clients do."""

    @abstractmethod
    def score(self, clients: Tensor, downs: Any, split: str) -> Scores:
        """The personal models of these clients, each with its row of downs, on the client's own samples."""

    @abstractmethod
    def score_global(self, server: Any, split: str) -> Scores | None:
        """The global model on every client's samples; None if the method has none."""

    @abstractmethod
    def state(self, client: int) -> Any:
        """What this client remembers, on the CPU."""

    def close(self) -> None:  # noqa: B027  most have nothing to give back
        """Give back processes and memory."""

    def split(self, name: str) -> Split:
        split: Split | None = getattr(self.data, name)
        if split is None:
            raise CoterieError(f"these clients have no {name} samples")
        return split


def keys(seed: int, turn: Turn, clients: Tensor) -> Tensor:
    """(S,) the randomness of these clients in this round."""
    return order.fold(order.fold(order.seed_key(seed), turn.round), clients)


def send(method: AnyMethod, server: Any, clients: Tensor) -> Any:
    """One Down with a leading axis: row s is for clients[s]. What all get alike is not copied."""
    if method.batched:
        return torch.func.vmap(lambda client: method.server_send(server, client))(clients)
    return tree.stack([method.server_send(server, client) for client in clients])


def global_logits(method: AnyMethod, model: Model, server: Any, x: Tensor) -> Tensor:
    logits = method.server_predict(model, server, x)
    if logits is None:
        raise ValueError(f"{method.title} has no global model")
    return logits


def has_global(method: AnyMethod, model: Model, server: Any, data: FederatedData) -> bool:
    x = data.train.x[:1].to(model.mean.device)
    with torch.no_grad():
        return method.server_predict(model, server, x) is not None


def judge(logits: Tensor, y: Tensor) -> Tensor:
    """(n, 2) for each sample: 1 if right, and its cross entropy."""
    right = (logits.argmax(1) == y).to(torch.float64)
    return torch.stack([right, F.cross_entropy(logits, y, reduction="none").to(torch.float64)], 1)


def scores(clients: Tensor, counted: Tensor, split: Split) -> Scores:
    """From (S, 2) sums over each client's samples."""
    counted = counted.cpu()
    total = torch.tensor(split.sizes)[clients]
    return Scores(clients, counted[:, 0], total, counted[:, 1] / total.clamp_min(1))


def slices(stop: int, size: int, start: int = 0) -> list[slice]:
    return [slice(at, min(at + size, stop)) for at in range(start, stop, size)]


def check_batches(method: AnyMethod, data: FederatedData) -> None:
    """Drop-last with a client smaller than a batch would silently mean that it never trains."""
    if not method.train.drop_last:
        return
    small = [i for i, n in enumerate(data.train.sizes) if n < method.train.batch]
    if small:
        raise CoterieError(
            f"batch size {method.train.batch} with drop-last leaves nothing to train on: client {small[0]} has "
            f"{data.train.sizes[small[0]]} samples ({len(small)} such clients); use a smaller batch or no drop-last"
        )
