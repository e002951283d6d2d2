"""A method of one's own whose functions return what they must not: refused at the start, by function and field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import coterie
from coterie.core.batch import Data
from coterie.core.errors import CoterieError
from coterie.core.losses import cross_entropy
from coterie.core.method import Census, Method
from coterie.core.model import Model, Weights, make_model
from coterie.core.rehearsal import rehearse, vmap_problem
from coterie.core.training import LocalTraining
from coterie.core.tree import Tree, average
from coterie.methods import METHODS
from tests import toy


class Server(NamedTuple):
    weights: Weights


class State(NamedTuple):
    steps: Tensor


class Down(NamedTuple):
    weights: Weights


class Up(NamedTuple):
    weights: Weights
    samples: Tensor


class Other(NamedTuple):
    weights: Weights


@dataclass(frozen=True)
class Mine(Method[Server, State, Down, Up]):
    """FedAvg, which a test breaks in one place."""

    title: ClassVar[str] = "Mine"
    results: ClassVar[dict[str, str]] = {"Mine": "pre"}

    def server_init(self, model: Model, census: Census) -> Server:
        return Server(model.start)

    def server_send(self, server: Server, client: Tensor) -> Down:
        return Down(server.weights)

    def client_init(self, model: Model, data: Data, welcome: Tree) -> State:
        return State(torch.zeros(()))

    def loss(self, model: Model, w: Weights, batch: Any) -> Any:
        return cross_entropy(model(w, batch.x), batch.y)

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
        weights, _ = self.train(down.weights, lambda w, batch: self.loss(model, w, batch), data, {})
        return State(state.steps + 1), Up(weights, data.samples)

    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        return Server(average(ups.weights, ups.samples))

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        return model(down.weights, x)


def broken(**functions: Any) -> Any:
    return type("Mine", (Mine,), functions)(train=LocalTraining(local_epochs=3, batch_size=8, lr=0.05))


def train_with(make: Any) -> Any:
    """client_train that gives something else: made of its own result."""

    def client_train(self: Any, model: Any, state: Any, down: Any, data: Any) -> Any:
        return make(*Mine.client_train(self, model, state, down, data), data)

    return {"client_train": client_train}


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "scalar loss": (
        {"loss": lambda self, model, w, batch: cross_entropy(model(w, batch.x), batch.y).mean()},
        r"Mine\.client_train: the loss must have one value for each sample, shape \(\d,\), got shape \(\)",
    ),
    "loss per class": (
        {"loss": lambda self, model, w, batch: model(w, batch.x)},
        r"Mine\.client_train: the loss must have .*, got shape \(\d, 4\)",
    ),
    "loss is a number": ({"loss": lambda *given: 0.0}, r"Mine\.client_train: the loss must .*, got float"),
    "no pair": (
        train_with(lambda state, up, data: up),
        r"Mine\.client_train must return a pair \(State, Up\), got Up",
    ),
    "nothing": (train_with(lambda *given: None), r"Mine\.client_train must return a pair .* got None"),
    "a number is sent": (
        train_with(lambda state, up, data: (state, up._replace(samples=3.0))),
        r"Mine\.client_train sends Up\.samples = 3\.0 \(float\)",
    ),
    "a dictionary is sent": (
        train_with(lambda state, up, data: (state, up._asdict())),
        r"Mine\.client_train must return Up as a named tuple, got dict",
    ),
    "shape by client": (
        train_with(lambda state, up, data: (state, up._replace(samples=data.y.double()))),
        r"Mine\.client_train Up\.samples is float64 \(4,\) for a client with 4 samples and float64 \(2,\)",
    ),
    "state of another form": (
        train_with(lambda state, up, data: (State(state.steps[None]), up)),
        r"Mine\.client_train returns steps as float32 of 1 axes, but client_init made it float32 of 0 axes",
    ),
    "state with a list": (
        {"client_init": lambda self, *given: State([1.0])},  # type: ignore[arg-type]
        r"Mine\.client_init returns State\.steps = list",
    ),
    "another message": (
        {"server_send": lambda self, server, client: Other(server.weights)},
        r"Mine\.server_send must send Down to client_train, got Other",
    ),
    "server of another form": (
        {"server_receive": lambda self, server, clients, ups: Server(ups.weights)},
        r"Mine\.server_receive returns weights\.encoder.* as .* of \d axes, but server_init made it",
    ),
    "classes predicted": (
        {"client_predict": lambda self, model, state, down, x: model(down.weights, x).argmax(1)},
        r"Mine\.client_predict must return logits of shape \(4, 4\), got a tensor, int64 \(4,\)",
    ),
}


@pytest.mark.parametrize("where", ["looped", "stacked"])
@pytest.mark.parametrize(("functions", "message"), WRONG.values(), ids=list(WRONG))
def test_what_is_wrong_is_named(functions: dict[str, Any], message: str, where: str) -> None:
    with pytest.raises(CoterieError, match=message) as error:
        coterie.run(broken(**functions), toy.toy(), toy.network(), backend=where, rounds=1)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("where", ["looped", "stacked"])
def test_a_right_one_runs(where: str) -> None:
    result = coterie.run(broken(), toy.toy(), toy.network(), backend=where, rounds=1)
    assert all(float(result.states[i].steps) == 1 for i in range(5))


@pytest.mark.parametrize("batch_norm", [False, True], ids=["plain", "batchnorm"])
@pytest.mark.parametrize("name", METHODS)
def test_every_method_passes(name: str, batch_norm: bool) -> None:
    data, model = toy.toy(), make_model(toy.network_for(name, batch_norm), toy.SHAPE, toy.CLASSES)
    rehearse(toy.method(name), model, data.train.x, data.train.y)
    assert vmap_problem(toy.method(name), model, data.train.x, data.train.y) == ""


def test_a_rehearsal_draws_nothing() -> None:
    data, before = toy.toy(), torch.random.get_rng_state()
    rehearse(toy.method("fedavg"), toy.model(), data.train.x, data.train.y)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_auto_loops_a_method_that_branches_on_values() -> None:
    """It does not say stackable = False, but cannot be: so `auto` finds out."""

    def client_train(self: Any, model: Any, state: Any, down: Any, data: Any) -> Any:
        after, up = Mine.client_train(self, model, state, down, data)
        return (after, up) if up.samples > 0 else (state, up)

    many = toy.toy(train=(8,) * 8, test=(2,) * 8)
    method = broken(client_train=client_train)
    network = nn.Sequential(nn.Flatten(), nn.Linear(144, 4), nn.Linear(4, 4))
    assert coterie.run(method, many, network, rounds=1).history
    with pytest.raises(CoterieError, match=r"clients cannot be stacked: .*data-dependent control flow"):
        coterie.run(method, many, network, rounds=1, backend="stacked")
