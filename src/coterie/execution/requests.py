"""What a backend asks of its clients, and how one client does it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.core import random, tree
from coterie.core.batch import Data
from coterie.core.method import AnyMethod, messages
from coterie.core.model import Model
from coterie.execution.scoring import global_logits, score


class Turn(NamedTuple):
    """The round that clients take part in."""

    round: int
    rate: float = 1.0  # factor on the learning rate
    measured: bool = True  # whether participants are evaluated right after training


class Request(NamedTuple):
    """What a backend asks of clients."""

    action: str  # join, train, finish, score or score_global
    split: str = "train"  # the samples that it uses
    turn: Turn = Turn(-1)
    every: bool = False  # score, score_global: every metric of the task, not only the primary one
    shared: Any = ()  # what all clients receive: the welcome (join), the server's state (score_global)


class Cohort(NamedTuple):
    """Clients that are computed in one call."""

    clients: Tensor  # (C,) ids, ascending
    ids: Tensor  # (C,) the same on the device
    rows: Tensor  # (C,) their positions among the requested clients, on the device
    length: int = 0  # stacked: samples of each client, with padding
    ragged: bool = False  # whether any client is padded


class CohortInput(NamedTuple):
    """A cohort with its rows of states and downs."""

    cohort: Cohort
    states: Any
    downs: Any


def cohort_of(clients: Tensor, rows: Tensor, device: torch.device, *about: Any) -> Cohort:
    """The cohort of some rows of the requested clients; about: its remaining fields."""
    return Cohort(clients[rows], clients[rows].to(device), rows.to(device), *about)


def consecutive(clients: Tensor, limit: int, device: torch.device) -> list[Cohort]:
    """Cohorts of at most `limit` clients in order."""
    return [cohort_of(clients, rows, device) for rows in torch.arange(len(clients)).split(limit)]  # type: ignore[no-untyped-call]


def act(method: AnyMethod, model: Model, request: Request, data: Data, state: Any, down: Any) -> Any:
    """Process a request on one client. `LocalBackend.compute` says what it returns."""
    match request.action:
        case "join":
            return method.client_init(model, data, request.shared)
        case "train":
            return method.client_train(model, state, down, data)
        case "finish":
            return method.client_finish(model, state, down, data)
        case "score":
            return score(lambda x: method.client_predict(model, state, down, x), data, model.task, request.every)
        case "score_global":
            return score(lambda x: global_logits(method, model, request.shared, x), data, model.task, request.every)
    raise ValueError(f"unknown action '{request.action}'")


def keys(seed: int, turn: Turn, clients: Tensor) -> Tensor:
    """(S,) random keys of these clients in this round."""
    return random.derive(random.seed_key(seed, turn.round), clients)


def keys_for(request: Request, seed: int, clients: Tensor) -> Tensor:
    """(S,) keys for a request. Predictions draw no random numbers, so any will do for scores."""
    return clients if request.action.startswith("score") else keys(seed, request.turn, clients)


def send(method: AnyMethod, server: Any, clients: Tensor) -> Any:
    """The messages to these clients, computed where the server's state is: one Down with a leading axis."""
    device = next((t.device for t in tree.leaves(server)), clients.device)
    return messages(method, server, clients.to(device, non_blocking=True))
