"""Every method with every protection: it runs, looped as stacked, or it is refused by name."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from coterie.core.errors import CoterieError
from coterie.core.wrapper import innermost
from coterie.methods import METHODS
from coterie.privacy import Protection
from coterie.privacy.robust import ONE_FOR_ALL
from tests import toy

KINDS: dict[str, dict[str, Any]] = {
    "clip": {"robust": "clip"},
    "trimmed": {"robust": "trimmed"},
    "median": {"robust": "median"},
    "geometric-median": {"robust": "geometric-median"},
    "client": {"dp": "client"},
    "sample": {"dp": "sample"},
    "statistics": {"dp_statistics": 0.5, "dp_statistics_clip": 1.0},
    "both": {"dp": "sample", "dp_statistics": 0.5, "dp_statistics_clip": 1.0},
}
FAIR = {"q-fedavg", "afl"}  # by the loss that each client sends
OWN_ENCODERS = {"fedproto", "fedgh", "fedtgp"}  # that send class statistics only
STATISTICS = {"fedpac", "fedpac-proto"} | OWN_ENCODERS
TREATS_EACH = {"fedfomo", "hypcluster", "apple", "cfl"}  # the server compares clients, or hands their models on
REFUSED = {
    "clip": {"local"} | TREATS_EACH,
    "trimmed": {"local", "pfedfda"} | TREATS_EACH | OWN_ENCODERS,
    "median": {"local", "pfedhn", "pfedla", "fedamp", "fedcac", "pfedfda", "floco"} | TREATS_EACH | STATISTICS | FAIR,
    "client": {
        "local",
        "pfedhn",
        "pfedla",
        "feddyn",
        "fedreg",
        "fedgen",
        "fedcac",
        "floco",
        "fedas",
        "fednova",
        "fedamp",
        "feddbe",
        "pfedfda",
    }
    | TREATS_EACH
    | STATISTICS
    | FAIR,
    "sample": {"fedem", "gpfl", "fedreg", "fedrod", "fedgen", "fedlc", "fedas", "pfedfda", "per-fedavg", "fedala"}
    | {"fedfomo", "hypcluster", "feddbe", "fedcp"}
    | STATISTICS
    | FAIR,
    "statistics": set(METHODS) - {"fedpac", "fedpac-proto"},
    "both": set(METHODS) - OWN_ENCODERS,
}
# What they are refused for can be switched off.
LIFTED = [
    ("client", "fedreg", {"rebalance": False}),
    ("sample", "fedreg", {"rebalance": False}),
    ("sample", "fedrod", {"balance": 0.0}),
    ("both", "fedpac", {"align": 0.0}),
    ("both", "fedpac-proto", {"align": 0.0}),
]
RAISED = [
    ("client", "fedper", {"average_heads": True}),
    ("client", "fedrep", {"average_heads": True}),
    ("client", "gpfl", {"average_heads": True}),
    ("clip", "fedproto", {"prototypes": "local"}),
    ("both", "fedproto", {"prototypes": "local"}),
]


a_model = cache(toy.model)  # no test writes into it


def protected(kind: str, name: str, **own: Any) -> Any:
    quick = {"local_epochs": 1, "steps": 2} if name == "pfedme" else {"local_epochs": 1}
    return Protection(**KINDS[kind]).around(toy.method(name, **quick, **own), a_model(), joining=3, seed=7)


def assert_stacked_is_looped(method: Any) -> None:
    model, data = a_model(), toy.toy()
    looped, history = toy.looped(method, model, data, rounds=2)
    stacked, _ = toy.stacked(method, model, data, rounds=2)
    assert toy.distance(looped, stacked) < 1e-9
    assert all(t.isfinite().all() for t in looped.values())
    assert not any(record.left_out for record in history)


REFUSED["geometric-median"] = REFUSED["median"]


@pytest.mark.parametrize("how", ONE_FOR_ALL)
@pytest.mark.parametrize("name", METHODS)
def test_one_update_for_all_is_refused_where_the_median_is(how: str, name: str) -> None:
    if name not in REFUSED["median"]:
        Protection(robust=how).check(toy.method(name))
        return
    with pytest.raises(CoterieError, match=f"^{METHODS[name].title} does not support --robust {how}: ."):
        Protection(robust=how).check(toy.method(name))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", METHODS)
def test_protected_or_refused(kind: str, name: str) -> None:
    if name in REFUSED[kind]:
        with pytest.raises(CoterieError, match=f"^{METHODS[name].title} does not support --(robust|dp).*: ."):
            protected(kind, name)
        return
    method = protected(kind, name)
    assert_stacked_is_looped(method)
    assert type(innermost(method)) is METHODS[name]


@pytest.mark.parametrize(("kind", "name", "settings"), LIFTED)
def test_settings_that_lift_a_refusal(kind: str, name: str, settings: dict[str, Any]) -> None:
    assert_stacked_is_looped(protected(kind, name, **settings))


@pytest.mark.parametrize(("kind", "name", "settings"), RAISED)
def test_settings_that_raise_one(kind: str, name: str, settings: dict[str, Any]) -> None:
    with pytest.raises(CoterieError, match="does not support"):
        protected(kind, name, **settings)
