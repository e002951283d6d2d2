"""Declared protections against the behaviour of the methods: every declaration, and some that are false."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
from torch import Tensor

from coterie.core.batch import Data
from coterie.core.errors import CoterieError
from coterie.core.model import Model
from coterie.core.protections import ALLOWED, KINDS, Protections
from coterie.core.training import LocalTraining
from coterie.methods import METHODS, FedAvg, FedFomo, FedPAC
from coterie.methods.fedavg import Down, Server, State, Up
from coterie.privacy import Protection
from coterie.privacy.judge import JUDGES

QUICK = LocalTraining(local_epochs=1, batch_size=2, lr=0.05, momentum=0.5)


STRICTER = {  # refused for reasons that the judges cannot see
    ("feddbe", "dp-client"),  # they look at the second round
    ("feddbe", "dp-sample"),
    ("fedcp", "dp-sample"),  # at batches of one sample
    ("per-fedavg", "dp-sample"),
    ("pfedfda", "dp-client"),  # and do not know that a field is a covariance
}


@pytest.mark.parametrize("kind", JUDGES)
@pytest.mark.parametrize("name", METHODS)
def test_declarations_are_what_methods_do(name: str, kind: str) -> None:
    method = METHODS[name](train=QUICK)
    declared, found = method.protections[kind](method) is None, JUDGES[kind](method) is None
    assert (declared, found) == (False, True) if (name, kind) in STRICTER else declared == found


@pytest.mark.parametrize("name", METHODS)
def test_every_method_declares_privacy(name: str) -> None:
    assert {"dp-client", "dp-sample"} <= set(METHODS[name].protections) <= set(KINDS)


@dataclass(frozen=True)
class Trivial(FedAvg):
    title: ClassVar[str] = "Trivial"


def allowed(method: Any, **asked: Any) -> None:
    Protection(**asked).check(method)


def test_a_subclass_that_changes_nothing_keeps_what_it_inherits() -> None:
    allowed(Trivial(), dp="client")
    allowed(Trivial(), dp="sample")
    allowed(Trivial(), robust="median")


def test_a_name_grants_nothing() -> None:
    @dataclass(frozen=True)
    class FedAvg(FedFomo):
        title: ClassVar[str] = "FedAvg"

    with pytest.raises(CoterieError, match=r"^FedAvg does not support --dp client: its server hands every"):
        allowed(FedAvg(), dp="client")
    with pytest.raises(CoterieError, match=r"^FedAvg does not support --robust clip"):
        allowed(FedAvg(), robust="clip")


def test_a_false_declaration_is_refused() -> None:
    @dataclass(frozen=True)
    class Fomo(FedFomo):
        title: ClassVar[str] = "FedAvg"
        protections: ClassVar[Protections] = {"dp-client": ALLOWED, "dp-sample": ALLOWED}

    @dataclass(frozen=True)
    class Statistics(FedPAC):
        protections: ClassVar[Protections] = {"dp-sample": ALLOWED}

    with pytest.raises(CoterieError, match="from the updates of single clients, not from their mean"):
        allowed(Fomo(), dp="client")
    with pytest.raises(CoterieError, match="depends on samples other than by gradients"):
        allowed(Fomo(), dp="sample")
    with pytest.raises(CoterieError, match="depends on samples other than by gradients"):
        allowed(Statistics(), dp="sample")


def test_a_function_that_makes_an_inherited_declaration_wrong_is_noticed() -> None:
    @dataclass(frozen=True)
    class Favourite(FedAvg):
        def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
            first: Server = Server(type(server.weights)(*({n: t[0] for n, t in p.items()} for p in ups.weights)))
            return first

    @dataclass(frozen=True)
    class Tells(FedAvg):
        def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
            state, up = super().client_train(model, state, down, data)
            return state, up._replace(samples=data.counts[0])

    with pytest.raises(CoterieError, match="not from their mean"):
        allowed(Favourite(), dp="client")
    with pytest.raises(CoterieError, match="its clients send `samples`"):
        allowed(Tells(), dp="sample")


def test_a_method_without_declaration_is_refused_and_told_where_to_declare() -> None:
    undeclared = replace(Trivial())
    object.__setattr__(undeclared, "protections", {})
    with pytest.raises(CoterieError, match="does not declare it in `protections`"):
        allowed(undeclared, dp="client")
