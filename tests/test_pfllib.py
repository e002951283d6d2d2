"""Accuracy against PFLlib's implementations, on the same partition of Fashion-MNIST, with its network and settings.

`reference/pfllib.json` has its accuracy by round. Its code is not a truth: where it departs from a paper, the row below
says how, and what we compare with. Rows with few rounds are those whose curves agree by then. Three methods cannot be
compared. Its FedPHP trains nothing (the cross entropy has weight 0 by default), its APPLE sends the mixture in place of
the core model and multiplies the learning rate by the number of clients, and its FedProto predicts by the nearest
prototype, where ours has the head.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import coterie
from coterie.core import tree
from coterie.core.batch import Data
from coterie.core.data import FederatedData, Transform
from coterie.core.method import AnyMethod
from coterie.core.model import Model
from coterie.core.ranges import Counted
from coterie.core.tree import Tree
from coterie.methods.fedala import Down as Received
from coterie.methods.fedala import FedALA
from coterie.methods.fedala import State as MixingState
from coterie.methods.fedgh import Down, FedGH, Server, State

HERE = Path(__file__).parent / "reference"
ROUNDS = 10
FEW = 4  # for rows whose curves agree by then
TOLERANCE = 1.5  # percentage points


class Row(NamedTuple):
    method: str | type[AnyMethod]
    settings: dict[str, Any]
    point: str  # where we measure
    key: str  # in pfllib.json
    why: str = ""  # how their code departs from the paper
    rounds: int = ROUNDS


class WithHead(NamedTuple):
    prototypes: Tensor
    counts: Counted
    head: Tree


@dataclass(frozen=True)
class FedGHOfClient0(FedGH):
    """Their server's head is the head object of client 0, so it also takes all local steps of that client.

    That is the difference to ours: 80.18 after 10 rounds with it, 78.82 without, 80.42 there.
    """

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Any]:
        state, up = super().client_train(model, state, down, data)
        return state, WithHead(up.prototypes, up.counts, state.head)

    def server_receive(self, server: Server, clients: Tensor, ups: Any) -> Server:
        first = int((clients == 0).nonzero())
        return Server(tree.apply(lambda t: t[first], ups.head), ups.prototypes, ups.counts)


@dataclass(frozen=True)
class FedALALearned(FedALA):
    """They test after learning W for the next download; ours mixes it with the last W until training begins."""

    def client_finish(self, model: Model, state: MixingState, down: Received, data: Data) -> MixingState:
        return state._replace(mixing=self.learned(model, state, down, data))


ROWS = [
    Row("fedavg", {}, "pre", "FedAvg"),
    Row("moon", {"contrast": 1.0, "temperature": 0.5}, "pre", "MOON mu=1 tau=0.5", rounds=FEW),
    Row(FedALALearned, {}, "finished", "FedALA"),
    Row("local", {}, "post", "FedAMP", why="(their proximal term has no gradient and no cloud model is loaded)"),
    Row(
        "feddbe",
        {"pull": 50.0},
        "pre",
        "FedDBE kl_weight=50 momentum=1",
        why="(their consensus comes from a training before round 1: -4.8 points then)",
        rounds=FEW,
    ),
    Row("per-fedavg", {"inner_lr": 0.01}, "finished", "PerAvg"),
    Row("fedntd", {}, "pre", "FedNTD beta=1", rounds=6),
    Row("fedcac", {}, "pre", "FedCAC tau=0.5 beta=100", rounds=8),
    Row("fedas", {}, "post", "FedAS", rounds=8),
    Row(FedGHOfClient0, {"server_lr": 0.01, "server_batch": 50}, "pre", "FedGH server_learning_rate=0.01", rounds=FEW),
    Row("fedper", {}, "pre", "FedPer"),
    Row("fedrep", {"head_epochs": 1, "encoder_epochs": 5}, "pre", "FedRep"),
    Row("fedrod", {}, "pre", "FedRoD"),
    Row("fedprox", {"pull": 0.1}, "pre", "FedProx mu=0.1", rounds=FEW),
    Row("scaffold", {}, "pre", "SCAFFOLD", rounds=FEW),
    Row("fedlc", {}, "pre", "FedLC", why="(their class counts are those of all clients together)", rounds=FEW),
    Row("fedcp", {"align": 1.0}, "pre", "FedCP", why="(their policy draws Gumbel noise, in testing too)", rounds=FEW),
    Row(
        "gpfl",
        {"pull": 1.0, "table_decay": 0.0},
        "pre",
        "GPFL",
        why="(their first conditions come from a random table, ours are zero: -13 points after round 2, gone by 4)",
        rounds=FEW,
    ),
    Row(
        "fedgen",
        {"noise": 512, "hidden_units": 512, "diversity": 0.0}
        | {"server_lr": 0.005, "server_steps": 1000, "server_batch": 50},
        "pre",
        "FedGen",
    ),
]


@cache
def clients() -> FederatedData:
    data = coterie.load_clients("fashion-mnist", partition=str(HERE / "fashion_mnist_20_clients.npz"))
    return replace(data, transform=Transform((0.5,), (0.5,)))


def network() -> nn.Module:
    """PFLlib's FedAvgCNN for one channel: 582,026 parameters."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10),
        )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{getattr(row.method, '__name__', row.method)} and {row.key}")
def test_accuracies_are_those_of_pfllib(row: Row) -> None:
    theirs = json.loads((HERE / "pfllib.json").read_text())["methods"][row.key]["accuracy_by_round"][row.rounds]
    train = coterie.LocalTraining(local_epochs=5, batch_size=50, lr=0.01, momentum=0.0, weight_decay=0.0)
    made = (
        coterie.make_method(row.method, **row.settings) if isinstance(row.method, str) else row.method(**row.settings)
    )
    method = made.but(train=train)
    settings = {"rounds": row.rounds, "evaluate_every": row.rounds, "seed": 0}
    result = coterie.run(method, clients(), network(), progress=False, **settings)
    ours = 100 * result.history.curve(row.point)[-1][1]
    apart = f"ours {ours:.2f}, PFLlib {theirs:.2f}, {ours - theirs:+.2f} points"
    print(f"\n{method.title} and {row.key}, round {row.rounds}: {apart} {row.why}")
    assert abs(ours - theirs) <= TOLERANCE
