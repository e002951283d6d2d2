"""Somebody who writes a method: against the baselines, by its import path, with what the system says about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F

import coterie
from coterie.core.data import FederatedData
from coterie.core.training import LocalTraining
from coterie.methods import SCAFFOLD, FedAvg, FedPAC, FedRep, pFedMe

HERE = coterie.Execution(backend="looped", processes=1)


@pytest.fixture(scope="module")
def data() -> FederatedData:
    return coterie.load_clients("fashion-mnist-small", num_clients=4, local_size=30, test_size=10)


def trained(method: Any, data: FederatedData, **settings: Any) -> coterie.Result:
    return coterie.run(method, data, "linear", backend=HERE, **{"rounds": 2, **settings})


def assert_equal(one: coterie.Result, other: coterie.Result) -> None:
    """The same history and the same models, to the last bit."""
    for a, b in zip(one.history, other.history, strict=True):
        assert a.scores.keys() == b.scores.keys()
        for key, scores in a.scores.items():
            assert torch.equal(scores.loss, b.scores[key].loss)
    x = torch.zeros(2, 1, 28, 28, dtype=torch.uint8)
    assert torch.equal(one.personal_model(1)(x), other.personal_model(1)(x))


@dataclass(frozen=True)
class Mine(FedAvg):
    """A subclass, as in the guide for authors."""

    title: ClassVar[str] = "Mine"


@pytest.mark.parametrize(
    ("name", "made"),
    [("fedavg", FedAvg()), ("fedavg", Mine()), ("fedrep", FedRep()), ("pfedme", pFedMe()), ("scaffold", SCAFFOLD()),
     ("fedpac", coterie.make_method("fedpac"))],
    ids=lambda v: v if isinstance(v, str) else type(v).__name__,
)  # fmt: skip
def test_an_object_trains_as_its_name_does(name: str, made: Any, data: FederatedData) -> None:
    named, given = trained(name, data, local_epochs=1), trained(made, data, local_epochs=1)
    assert named.method.train == given.method.train
    assert given.method.train.momentum == 0.5  # FedPAC's protocol, which is the default
    assert_equal(named, given)


def test_what_is_set_wins_also_where_it_is_the_default(data: FederatedData) -> None:
    assert (LocalTraining().momentum, FedRep().head_epochs) == (0.0, 1)  # so these say nothing new, but they say it
    method = trained(FedRep(train=LocalTraining(momentum=0.0, local_epochs=1), head_epochs=1), data).method
    assert (method.train.momentum, method.head_epochs) == (0.0, 1)
    assert (method.train.weight_decay, method.encoder_epochs) == (5e-4, 1)  # not set: the protocol's
    method = trained(coterie.make_method("fedrep", momentum=0.0, local_epochs=1), data).method
    assert (method.train.momentum, method.head_epochs) == (0.0, 10)


def test_another_protocol_reaches_objects_too(data: FederatedData) -> None:
    method = trained(FedPAC(train=LocalTraining(local_epochs=1, drop_last=False)), data, protocol="akd").method
    assert (method.train.batch_size, method.train.keep_momentum, method.train.drop_last) == (128, True, False)


def test_settings_of_a_call_and_of_an_object_do_not_contradict_each_other(data: FederatedData) -> None:
    assert trained(FedAvg(train=LocalTraining(local_epochs=1)), data, lr=0.5).method.train.lr == 0.5
    with pytest.raises(coterie.CoterieError, match=r"lr is set twice: 0.1 in the method and 0.5 in this call"):
        trained(FedAvg(train=LocalTraining(lr=0.1)), data, lr=0.5)


@dataclass(frozen=True)
class MeanLoss(FedAvg):
    """Averages the loss itself, as one does in a training loop of one's own."""

    title: ClassVar[str] = "MeanLoss"

    def client_train(self, model: Any, state: Any, down: Any, data: Any) -> Any:
        weights, momentum = self.train(
            down.weights, lambda w, batch: F.cross_entropy(model(w, batch.x), batch.y), data, state.momentum
        )
        return state._replace(momentum=momentum), super().client_train(model, state, down, data)[1]._replace(
            weights=weights
        )


@dataclass(frozen=True)
class SendsANumber(FedAvg):
    title: ClassVar[str] = "SendsANumber"

    def client_train(self, model: Any, state: Any, down: Any, data: Any) -> Any:
        state, up = super().client_train(model, state, down, data)
        return state, up._replace(samples=len(data.y))


@dataclass(frozen=True)
class SendsOnly(FedAvg):
    title: ClassVar[str] = "SendsOnly"

    def client_train(self, model: Any, state: Any, down: Any, data: Any) -> Any:
        return super().client_train(model, state, down, data)[1]


@pytest.mark.parametrize("where", ["looped", "stacked"])
@pytest.mark.parametrize(
    ("method", "message"),
    [
        (
            MeanLoss(),
            r"MeanLoss\.client_train: the loss must have one value for each sample, shape \(\d,\), got shape \(\)",
        ),
        (SendsANumber(), r"SendsANumber\.client_train sends Up\.samples = \d \(int\); only tensors can be sent"),
        (SendsOnly(), r"SendsOnly\.client_train must return a pair \(State, Up\), got Up"),
    ],
    ids=["scalar loss", "a number", "no state"],
)
def test_a_mistake_is_named_by_function_and_field(method: Any, message: str, where: str, data: FederatedData) -> None:
    with pytest.raises(coterie.CoterieError, match=message):
        coterie.run(method, data, "linear", backend=where, rounds=1)
