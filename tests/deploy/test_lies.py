"""Devices that send false values of valid form: every field of a hello and of an answer, generated from their types."""

from __future__ import annotations

import itertools
import json
import math
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from coterie.api import About, choose
from coterie.core import tree
from coterie.core.data import Column, Transform
from coterie.core.rehearsal import rehearse
from coterie.deploy.agreement import Agreement
from coterie.deploy.device import Device
from coterie.deploy.handshake import Hello, HostedClient, SampleSchema, dtype_of, hello, to_json
from coterie.deploy.membership import Membership
from coterie.deploy.remote import Remote
from coterie.deploy.server import network_for
from coterie.deploy.store import Store
from coterie.deploy.task_schema import TaskSchema
from coterie.deploy.wire import Header, Refused
from coterie.federation import Settings, federate
from coterie.methods import METHODS
from coterie.privacy.encryption import Encrypted
from coterie.privacy.keys import new_keys
from tests import direct, toy
from tests.federation.test_liars import lies
from tests.machines import Missing

COLUMNS = (Column("age", fill=50.0), Column("sex", ("f", "m"), 0.0), Column("chol", (), 200.0, indicator=True))
TABLE = SampleSchema(
    "heart",
    2,
    ("healthy", "sick"),
    (3,),
    "float32",
    Transform((0.0,) * 5, (1.0,) * 5, columns=COLUMNS),
    TaskSchema("classification", {"classes": 2}, ()),
)
PLAIN: dict[Any, list[Any]] = {
    dict[str, Any]: [{}, {"classes": 10**12}, {"classes": -1}, {"classes": [[2]]}, {"x": 1}, None, []],
    int: [-1, 0, 1, 3, 99, 2**31, 2**39, 2**53, 2**53 + 1, -(2**53), 10**30, True, 1.5, "x", None, []],
    float: [0, -1.0, 1e-300, 1e6, 9e15, 1e300, math.nan, math.inf, -math.inf, "1", None, True, []],
    str: ["", "x", "x" * 9999, "x" * 10_001, "\x00", "\u202e", "../..", "\ud800", 5, None, [], "qint8", "complex64",
          "int64", "load"],
    bool: [True, False, 0, 1, None, "true"],
}  # fmt: skip


# What a device says of itself.


def words(kind: Any) -> list[Any]:
    """Values that an attacker may send in place of a value of this type."""
    if is_dataclass(kind):
        return [None, [], {}, "x", 5]
    if isinstance(kind, types.UnionType):
        return [None, *words(next(part for part in typing.get_args(kind) if part is not type(None)))]
    if typing.get_origin(kind) is tuple:
        inner = words(typing.get_args(kind)[0])
        lists = [[value] * length for value in inner for length in (1, 2, 5)]
        return [[], None, {}, "ab", [[]], [inner[0]] * 100_001, *lists]
    return PLAIN[kind]


def places(kind: Any, told: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Where in the JSON of a dataclass each field is, all the way down, and its type."""
    hints = typing.get_type_hints(kind)
    for field in fields(kind):
        inner, here = hints[field.name], (*path, field.name)
        yield here, inner
        if is_dataclass(inner):
            yield from places(inner, told[field.name], here)
        elif typing.get_origin(inner) is tuple and is_dataclass(typing.get_args(inner)[0]):
            for row, value in enumerate(told[field.name]):
                yield from places(typing.get_args(inner)[0], value, (*here, row))


def lying_hellos(good: Hello) -> Iterator[tuple[str, bytes]]:
    """Hellos with one field changed, and which."""
    told = json.loads(to_json(good))
    for path, kind in places(Hello, told):
        for value in words(kind):
            changed = json.loads(json.dumps(told))
            inner = changed
            for part in path[:-1]:
                inner = inner[part]
            inner[path[-1]] = value
            yield f"{'.'.join(map(str, path))} = {value!r:.60}", json.dumps(changed).encode()


def prepare(membership: Membership) -> None:
    """What a server does before the first round, when all devices are there."""
    schema = membership.schema
    chosen, *_ = choose("fedavg", "pac", About(schema.name, schema.shape, membership.num_clients), {"rounds": 2})
    made, dtype = network_for("linear", schema, 0, None), dtype_of(schema)
    rehearse(chosen, made, torch.zeros(4, *schema.shape, dtype=dtype), torch.arange(4) % schema.classes)
    agreement = Agreement(chosen, made, membership.num_clients, schema.shape, dtype, membership.splits, 0)
    assert membership.held
    assert membership.about()
    assert membership.labels(range(membership.num_clients))
    assert len(membership.census.samples) == membership.num_clients
    assert agreement.start_message()


@cache
def images() -> SampleSchema:
    return SampleSchema.of(toy.toy())


def rows(*ids: int) -> tuple[HostedClient, ...]:
    return tuple(HostedClient(client, (9,), 3, 2) for client in ids)


@pytest.mark.parametrize("kind", ["images", "table"])
def test_a_hello_is_refused_or_a_server_can_begin_with_it(kind: str) -> None:
    """No other device is there to compare it with."""
    good = hello("liar", toy.toy().pick((0, 3)), (0, 1)) if kind == "images" else Hello("liar", TABLE, rows(0, 1))
    begun, count = 0, 0
    for what, message in lying_hellos(good):
        count += 1
        membership = Membership(2)
        try:
            membership.register("liar", message)
        except Refused as reason:
            str(reason).encode()
            continue
        if not membership.full:
            continue
        begun += 1
        try:
            if begun % 6 == 0 or "columns" in what or "dtype" in what or "axis" in what:
                prepare(membership)
        except Exception as error:
            raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    assert count > 400
    assert begun > 30


@pytest.mark.parametrize("kind", ["images", "table"])
def test_one_lying_hello_of_three_moves_nothing_with_robust_statistics(kind: str) -> None:
    """Its device's name comes first in the alphabet, so that nothing is true only for the last."""
    schema = images() if kind == "images" else TABLE
    taken = 0
    for what, message in lying_hellos(Hello("a-liar", schema, rows(2))):
        membership = Membership(3, robust=True)
        membership.add(Hello("b", schema, rows(0)))
        membership.add(Hello("c", schema, rows(1)))
        try:
            membership.register("a-liar", message)
        except Refused:
            continue
        taken += membership.full
        assert not membership.full or membership.schema == schema, what
    assert taken > 30


def test_a_category_that_fills_gaps_is_that_of_most_devices() -> None:
    """With robust statistics a device does not count more for claiming more samples."""
    other = replace(COLUMNS[1], fill=1.0)
    liar = replace(TABLE, transform=replace(TABLE.transform, columns=(COLUMNS[0], other, COLUMNS[2])))
    for robust, fill in ((False, 1.0), (True, 0.0)):
        membership = Membership(3, robust=robust)
        membership.add(Hello("a", TABLE, rows(0)))
        membership.add(Hello("b", TABLE, rows(1)))
        membership.add(Hello("c", liar, (HostedClient(2, (9_000_000,), 3, None),)))
        assert membership.schema.transform.columns[1].fill == fill


# What a device answers.


class Bench:
    """A server that has asked client 3 to train, and what an honest device answers."""

    def __init__(self, name: str, folder: Path) -> None:
        method, model, data = toy.method(name, local_epochs=1), toy.model(torch.float32), toy.toy()
        self.agreement = direct.agreement(method, model, data)
        self.remote = Remote(
            self.agreement, direct.census(data), direct.Direct([]), direct.TIMEOUTS, held={"test": toy.TEST_SIZES}
        )
        device = Device(self.agreement, data.pick((0, 3)), (0, 3), Store(folder))
        server = method.server_init(model, direct.census(data))
        welcome = self.agreement.request(Header("join", client=3, base=""), tree.flatten(method.server_welcome(server)))
        device.answer(welcome.own, welcome.shared)
        down = method.server_send(server, torch.tensor(3))
        header = Header("train", client=3, round=0, rate=1.0, base=welcome.header.made, measure=1)
        request = self.agreement.request(header, tree.flatten(down), self.agreement.shared_message(down))
        self.header = request.header
        answer, failed = device.answer(request.own, request.shared)
        assert not failed
        self.tensors = self.agreement.open_answer(answer, self.header).tensors

    def taken(self, tensors: tree.Tree) -> bool:
        """Whether the server takes an answer with these tensors, which travel as bytes."""
        try:
            said = self.agreement.open_answer(self.agreement.answer(self.header, tensors), self.header)
            self.remote.check(said)
        except Refused:
            return False
        return True


def wrong(name: str, t: Tensor, announced: float, method: Any) -> bool:
    """Whether an honest client could not have sent this, by rules that are written down here once more."""
    if name == "test":
        right, total, loss = t.tolist()
        return not (0 <= right <= total and total in (0.0, 11.0) and 0 <= loss < math.inf)
    if not bool((t.double().abs() <= 1e9).all()) and t.is_floating_point():
        return True
    match name.removeprefix("up.").partition(".")[0]:
        case "samples":
            return not math.isclose(float(t), announced, rel_tol=0.011)
        case "counts" | "effective":
            return bool((t < 0).any()) or not 1e-9 * announced <= float(t.double().sum()) <= 1.011 * announced
        case "variance" | "information":
            return bool((t < 0).any())
        case "loss":
            return isinstance(method, METHODS["q-fedavg"]) and bool((t < 0).any())
        case "cluster":
            return not 0 <= int(t) < method.clusters
    return False


@pytest.mark.parametrize("name", sorted(METHODS))
def test_answers_that_lie_are_refused_at_the_door(name: str, tmp_path: Path) -> None:
    """As bytes, every field of every method and of the scores."""
    bench = Bench(name, tmp_path)
    assert bench.taken(bench.tensors)
    refused = 0
    cases = ((field, lie) for field, t in bench.tensors.items() for lie in lies(t))
    for field, lie in itertools.islice(cases, 0, None, 2):
        taken = bench.taken(bench.tensors | {field: lie})
        refused += not taken
        assert taken != wrong(field, lie, 31.0, bench.agreement.method), (field, lie)
    assert refused > 5


class Lying(Device):
    """From the second round on, client 3 sends something else."""

    field: str
    spoil: Callable[[Tensor], Tensor]

    def _work(self, request: Any, client: int, state: Any, down: Any) -> Any:
        made = super()._work(request, client, state, down)
        if request.action != "train" or request.turn.round < 1 or client != 3:
            return made
        flat = tree.flatten(made[1])
        return made[0], tree.fill(made[1], flat | {self.field: self.spoil(flat[self.field])})


def with_liar(agreement: Agreement, folder: Path, field: str, spoil: Callable[[Tensor], Tensor]) -> Remote:
    data = toy.toy()
    devices, liar = (
        direct.devices(agreement, data, folder),
        Lying(agreement, data.pick((0, 3)), (0, 3), Store(folder / "liar")),
    )
    liar.field, liar.spoil = field, spoil
    timeouts = replace(direct.TIMEOUTS, grace=0.01)
    return Remote(agreement, direct.census(data), direct.Direct([liar, *devices[1:]]), timeouts, 0.5)


@pytest.mark.parametrize(
    ("name", "field", "value", "reason"),
    [
        ("fedpac", "moments", 1e20, "`moments` has 1e+20, beyond 1e+09 (--max-magnitude)"),
        ("hypcluster", "cluster", 99, "`cluster` is 99, not one of 0 to 4"),
        ("hypcluster", "cluster", -1, "`cluster` is -1, not one of 0 to 4"),
        ("fedavg", "samples", -31.0, "`samples` has -31, below 0"),
        ("fedpac-proto", "counts", 0.0, "`counts` sums to 0, and the client announced 31 samples"),
    ],
)
def test_a_federation_with_a_liar_is_one_without_it(
    name: str, field: str, value: float, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    method, model, data = direct.small(name)
    agreement = direct.agreement(method, model, data)
    clients = with_liar(agreement, tmp_path, field, lambda t: torch.full_like(t, value))
    server, history = federate(clients, Settings(rounds=3, seed=7))
    trained = [record.left_out for record in history if "train" in record.seconds]
    assert trained == [(), (3,), (3,)]
    assert f"round 2: client 3 did not train: its answer was refused: {reason}" in caplog.text
    alone = Missing(method, model, data, 7, processes=1)
    alone.left_out = {1: {3}, 2: {3}}
    expected, _ = federate(alone, Settings(rounds=3, seed=7))
    toy.assert_same(tree.flatten(expected), tree.flatten(server))


def test_a_flipped_bit_in_a_ciphertext_leaves_one_client_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("tenseal")

    def flipped(t: Tensor) -> Tensor:
        t = t.clone()
        t.view(-1)[5000] ^= 1
        return t

    method = Encrypted(inner=toy.method("fedper", local_epochs=1), keys=new_keys())
    agreement = direct.agreement(method, toy.model(torch.float32), toy.toy())
    clients = with_liar(agreement, tmp_path, "shared.ciphertexts", flipped)
    _, history = federate(
        clients, Settings(rounds=3, seed=7, evaluate_every=3)
    )  # in round 2 it does not measure itself
    assert [record.left_out for record in history if "train" in record.seconds] == [(), (3,), (3,)]
    refused = "its answer was refused: `shared.ciphertexts` has a damaged ciphertext"
    assert f"round 2: client 3 did not train: {refused}" in caplog.text
