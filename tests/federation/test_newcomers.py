"""Clients that were not in training."""

from __future__ import annotations

import pytest
import torch

import coterie
from coterie.core.errors import CoterieError
from coterie.federation.newcomers import keep_out
from coterie.methods import METHODS
from tests import toy

MANY = tuple(range(6, 26))


def test_a_share_of_clients_is_kept_out() -> None:
    data = toy.toy(train=MANY, test=MANY)
    known, strangers = keep_out(data, 0.4, seed=1)
    assert (known.num_clients, strangers.num_clients) == (12, 8)
    assert sorted(known.train.sizes + strangers.train.sizes) == sorted(MANY)  # all sizes differ: nobody is twice
    x, y = strangers.train.client(0)
    whole = data.train.client(MANY.index(strangers.train.sizes[0]))
    assert torch.equal(x, whole[0])
    assert torch.equal(y, whole[1])
    with pytest.raises(CoterieError, match="leaves none"):
        keep_out(data, 0.99, seed=1)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_meets_newcomers(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """They get a model and improve it, or the method says that it has nothing to give; looped as stacked."""
    data = toy.toy(train=MANY[:10], test=MANY[:10])
    found = []
    for where in (toy.IN_TURN, "stacked"):
        network = toy.network_for(name).double()
        result = coterie.run(toy.method(name), data, network, rounds=2, new_clients=0.4, backend=where, seed=3)
        record = result.history[-1]
        assert len(record.participants) == 4
        found.append({point: scores.weighted.tolist() for point, scores in record.scores.items()})
    assert found[0] == found[1]
    if found[0]:
        assert {("new_pre", "test"), ("new_post", "test")} <= set(found[0])
    else:
        assert "has no model for clients" in caplog.text


def test_fedavg_gives_newcomers_its_model() -> None:
    data = toy.toy(train=MANY[:10], test=MANY[:10])
    result = coterie.run(toy.method("fedavg"), data, toy.network(), rounds=2, new_clients=0.4, backend=toy.IN_TURN)
    last = result.history[-1].scores
    assert last["new_pre", "test"].weighted.tolist() == last["new_global", "test"].weighted.tolist()
    _, strangers = keep_out(data, 0.4, 0)
    x, y = strangers.test.client(2)
    logits = result.method.server_predict(result.model, result.server, x)
    assert logits is not None
    assert int((logits.argmax(1) == y).sum()) == int(last["new_pre", "test"].weighted[2])
