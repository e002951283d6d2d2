"""Clients that lie in a legal form: every method, every field, thousands of lies, each refused by name or harmless."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from coterie.core import random, ranges, tree
from coterie.core.errors import CoterieError
from coterie.core.method import Method
from coterie.execution import Answers, Looped
from coterie.execution.answers import Returned
from coterie.execution.requests import Turn, send
from coterie.federation import Settings, federate
from coterie.federation.culprits import received
from coterie.federation.rounds import receive
from coterie.methods import METHODS, VARIANTS
from coterie.privacy import Protection
from tests import toy

EVERYONE, KEY = torch.arange(5), random.server_key(0, 0)
LIARS = (1, 4)
WHOLE = (99, -1, 1, 2**31 - 1, -(2**31), 3)
NUMBERS = (
    0.0, -1.0, 1.0, 1e-30, 1e3, -1e3, 1e6, -1e6, 9.9e8, -9.9e8, 1.1e9, 1e20, -1e20, 1e38, -1e38, float("inf"),
    float("-inf"), float("nan"), 0.5, 7.25,
)  # fmt: skip
FACTORS = (-1.0, -20.0, 1e5, 1e-20, 1e30)


class Honest(NamedTuple):
    clients: Looped
    server: Any
    ups: Any
    after: Any


@cache
def honest(name: str, batch_norm: bool) -> Honest:
    """What the clients of a tiny federation send in their first round."""
    base, changes, _ = VARIANTS.get(name, (name, {}, ""))
    method = toy.method(base, local_epochs=1, **changes)
    clients = Looped(method, toy.model(torch.float32, batch_norm), toy.toy(), 7, processes=1)
    server = method.server_init(clients.model, clients.census)
    clients.join(method.server_welcome(server))
    returned = clients.begin(EVERYONE, send(method, server, EVERYONE), Turn(0))
    assert bool(returned.finite.all())
    return Honest(clients, server, returned.ups, receive(server, clients, returned.whole(), KEY))


def lies(t: Tensor) -> Iterator[Tensor]:
    """What a client may send in the place of one tensor."""
    if not t.is_floating_point():
        yield from (torch.full_like(t, value) for value in WHOLE)
        return
    for value in NUMBERS:
        yield torch.full_like(t, value)
        if t.numel() > 1:
            one = t.clone()
            one.view(-1)[t.numel() // 2] = value
            yield one
    yield from (t * factor for factor in FACTORS)


def told(name: str, batch_norm: bool, every: int) -> int:
    """Try lies on the server of a method, each n-th of them; how many there were."""
    clients, server, ups, _ = honest(name, batch_norm)
    flat, count = tree.flatten(ups), 0
    cases = ((field, liar, lie) for field, liar in itertools.product(flat, LIARS) for lie in lies(flat[field][liar]))
    for field, liar, lie in itertools.islice(cases, 0, None, every):
        count += 1
        sent = flat | {field: flat[field].clone()}
        sent[field][liar] = lie
        lied = tree.fill(ups, sent)
        usable = ranges.sound(lied, clients.known(EVERYONE))
        others = [client for client in EVERYONE.tolist() if client != liar]
        assert usable[others].all(), (field, lie)
        returned = Returned(EVERYONE, lied, usable, known=clients.known(EVERYONE))
        if not usable[liar]:
            fault = returned.fault(liar)
            assert f"`{field}`" in fault or fault == "its update is not finite", (field, lie, fault)
        answers, after = received(returned.sift(), lambda answers: receive(server, clients, answers, KEY), 1, 0.5)
        assert answers.left_out in ((), (liar,)), (field, lie)  # nobody else is blamed
        for where, t in tree.items(after):
            if t.is_floating_point():
                assert t.isfinite().all(), (field, lie, where)
                assert not where.endswith("running_var") or (t >= 0).all(), (field, lie)
        if answers.left_out:  # as if the liar had never answered
            picked = torch.tensor(others)
            expected = receive(server, clients, Answers(picked, tree.pick(ups, picked), (liar,)), KEY)
            toy.assert_same(tree.flatten(expected), tree.flatten(after))
    return count


@pytest.mark.parametrize("name", sorted(METHODS))
def test_some_lies(name: str) -> None:
    count = told(name, False, 40 if name == "pfedhn" else 9)  # whose server trains
    assert count > 10 or name == "local"


@pytest.mark.slow
def test_thousands_of_lies() -> None:
    assert sum(told(name, batch_norm, 1) for name in METHODS for batch_norm in (False, True)) >= 5000


def test_every_count_and_choice_is_declared() -> None:
    """A new field with one of these names must say what it may hold; a new name is covered by the magnitude."""
    for name in METHODS:
        for field, t, _ in ranges.ruled(honest(name, False).ups):
            rules = [rule for other, _, rule in ranges.ruled(honest(name, False).ups) if other == field]
            if field in ("samples", "counts", "effective", "variance", "information", "cluster"):
                assert any(rule is not ranges.MAGNITUDE for rule in rules), (name, field)
            elif t.is_floating_point():
                assert ranges.MAGNITUDE in rules


# Federations with one liar, as they were reproduced.


class Lying(Looped):
    """One client changes what it sends, from round 1 on."""

    field, value, liar = "", 0.0, 3

    def compute(self, request: Any, cohort: Any, states: Any, downs: Any) -> Any:
        made = super().compute(request, cohort, states, downs)
        if request.action != "train" or request.turn.round < 1:
            return made
        flat = tree.flatten(made[1])
        for row, client in enumerate(cohort.clients.tolist()):
            if client == self.liar:
                flat[self.field] = flat[self.field].clone()
                flat[self.field][row] = self.value
        return made[0], tree.fill(made[1], flat)


def lying(method: Method[Any, Any, Any, Any], field: str, value: float) -> Lying:
    clients = Lying(method, toy.model(torch.float32), toy.toy(), 7, processes=1)
    clients.field, clients.value = field, value
    return clients


@pytest.mark.parametrize(
    ("name", "field", "value", "words"),
    [
        ("fedpac", "moments", 1e20, "`moments` has 1e+20, beyond 1e+09 (--max-magnitude)"),
        ("fedpac", "variance", -1.0, "`variance` has -1, below 0"),
        ("fedpac", "counts", 0.0, "`counts` sums to 0, and the client announced 31 samples"),
        ("fedpac-proto", "counts", 0.0, "`counts` sums to 0, and the client announced 31 samples"),
        ("hypcluster", "cluster", 99, "`cluster` is 99, not one of 0 to 4"),
        ("hypcluster", "cluster", -1, "`cluster` is -1, not one of 0 to 4"),
        ("fedavg", "samples", -31.0, "`samples` has -31, below 0"),
        ("fedavg", "samples", 1e6, "`samples` sums to 1e+06, and the client announced 31 samples"),
        ("fedreg", "effective", 1e6, "`effective` sums to 1e+06, and the client announced 31 samples"),
        ("scaffold", "control_change.head.weight", float("nan"), "its update is not finite"),
    ],
)
def test_a_liar_is_named_and_the_round_goes_on(
    name: str, field: str, value: float, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    method = toy.method(name, local_epochs=1)
    field = next(n for n in tree.flatten(honest(name, False).ups) if n.endswith(field.rpartition(".")[2]))
    words = words.replace("control_change.head.weight", field)
    server, history = federate(lying(method, field, value), Settings(rounds=3, seed=7))
    trained = [record for record in history if "train" in record.seconds]
    assert [record.left_out for record in trained] == [(), (3,), (3,)]
    refused = words if words.startswith("its") else f"its update is refused: {words}"
    assert f"round 2: client 3 is left out, {refused}" in caplog.text
    assert all(t.isfinite().all() for t in tree.leaves(server) if t.is_floating_point())


@pytest.mark.parametrize("name", ["fedpac", "fedpac-proto"])
def test_robust_aggregation_with_counts_of_zero(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Pulled in, zeros would stay zeros, and the server would divide by them."""
    method = Protection(robust="clip").around(toy.method(name, local_epochs=1), toy.model(torch.float32), 5, 7)
    server, history = federate(lying(method, "counts", 0.0), Settings(rounds=2, seed=7))
    assert history[1].left_out == (3,)
    assert "client 3 is left out, its update is refused: `counts` sums to 0" in caplog.text
    assert all(t.isfinite().all() for t in tree.leaves(server) if t.is_floating_point())


class Touchy(METHODS["fedavg"]):  # type: ignore[misc,name-defined]
    """A server that fails with what it was not written for."""

    def server_receive(self, server: Any, clients: Tensor, ups: Any) -> Any:
        if (ups.weights.head["weight"].abs().amax((1, 2)) > 1e5).any():
            raise torch.linalg.LinAlgError("the factorization could not be completed")
        return super().server_receive(server, clients, ups)


@pytest.mark.parametrize("liars", [(3,), (0, 3)])
def test_an_exception_in_the_server_finds_the_culprits(
    liars: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    clients = lying(Touchy(train=toy.method("fedavg").train), "", 0)
    server = clients.method.server_init(clients.model, clients.census)
    ups = tree.flatten(honest("fedavg", False).ups)
    head = next(name for name in ups if "head" in name and name.endswith("weight"))
    ups[head] = ups[head].clone()
    ups[head][list(liars)] = 1e6
    lied = tree.fill(honest("fedavg", False).ups, ups)

    def take(answers: Answers) -> Any:
        return receive(server, clients, answers, KEY)

    kept, after = received(Answers(EVERYONE, lied, ()), take, 4, 0.5)
    assert kept.left_out == liars
    rest = torch.tensor([i for i in range(5) if i not in liars])
    toy.assert_same(tree.flatten(after), tree.flatten(take(Answers(rest, tree.pick(lied, rest), liars))))
    for liar in liars:
        said = f"round 4: client {liar} is left out, the server cannot use its update: LinAlgError"
        assert said in caplog.text.replace("_LinAlgError", "LinAlgError")
    with pytest.raises(
        CoterieError, match=rf"round 4: {len(liars)} of 5 clients .* share of 0.1 .* clients {liars[0]}"
    ):
        received(Answers(EVERYONE, lied, ()), take, 4, 0.1)


def test_a_server_that_always_fails_is_not_the_clients_fault() -> None:
    ups = honest("fedavg", False).ups

    def broken(answers: Answers) -> Any:
        raise KeyError("a mistake in the method")

    with pytest.raises(KeyError, match="a mistake in the method"):
        received(Answers(EVERYONE, ups, ()), broken, 1, 1.0)


def test_an_overflow_of_the_server_finds_the_culprit() -> None:
    """Each number is within the limit, and their product is not."""
    ups = honest("fedavg", False).ups

    def squared(answers: Answers) -> Any:
        return {"w": tree.leaves(answers.ups)[0].double().pow(40).sum(0).float()}

    flat = tree.flatten(ups)
    first = next(iter(flat))
    flat[first] = flat[first].clone()
    flat[first][2] = 9e8
    kept, after = received(Answers(EVERYONE, tree.fill(ups, flat), ()), squared, 1, 0.5)
    assert kept.left_out == (2,)
    assert after["w"].isfinite().all()


def test_the_limit_is_a_setting() -> None:
    import coterie

    result = coterie.run(toy.method("fedavg"), toy.toy(), toy.network(), rounds=1, max_magnitude=1e3)
    assert result.history[0].left_out == ()
    with pytest.raises(CoterieError, match=r"round 1: 5 of 5 clients .* beyond 1e-06 \(--max-magnitude\)"):
        coterie.run(toy.method("fedavg"), toy.toy(), toy.network(), rounds=1, max_magnitude=1e-6)
    with pytest.raises(CoterieError, match="max_magnitude must be above 0, got -1"):
        coterie.run(toy.method("fedavg"), toy.toy(), toy.network(), rounds=1, max_magnitude=-1)
