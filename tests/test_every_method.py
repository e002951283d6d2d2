"""What must hold for every method, on tiny ragged data with partial participation."""

from __future__ import annotations

import dataclasses
import itertools
import typing
from functools import cache
from typing import Any

import pytest
import torch

from coterie.core import tree
from coterie.core.data import FederatedData
from coterie.core.errors import CoterieError
from coterie.core.model import make_model
from coterie.core.training import LocalTraining
from coterie.execution import Looped, Request, Stacked, Turn
from coterie.execution.requests import send
from coterie.federation import History, Settings, federate
from coterie.methods import METHODS
from tests import toy, traffic

every_method = pytest.mark.parametrize("name", METHODS)
a_model, of_task = cache(toy.model), cache(toy.of_task)  # no test writes into them
RUN = {"rounds": 2, "seed": 24}  # client 0, which lacks classes, and client 2, with one sample, train in both rounds


@cache
def looped(
    name: str, dtype: torch.dtype = torch.float64, batch_norm: bool = False, keep_momentum: bool = False
) -> tuple[tree.Tree, History]:
    """The run that most tests compare with: one client after the other."""
    method = toy.method(name, keep_momentum=keep_momentum)
    return toy.looped(method, a_model(dtype, batch_norm), toy.toy(), **RUN)


def assert_alike(a: tuple[tree.Tree, History], b: tuple[tree.Tree, History]) -> None:
    """The same tensors, bytes and counted scores."""
    assert toy.distance(a[0], b[0]) < 1e-10
    for x, y in zip(a[1], b[1], strict=True):
        assert (x.bytes_up, x.bytes_down) == (y.bytes_up, y.bytes_down)
        assert {k: toy.rows(s)[:3] for k, s in x.scores.items()} == {k: toy.rows(s)[:3] for k, s in y.scores.items()}


@every_method
@pytest.mark.parametrize("batch_norm", [False, True], ids=["plain", "batchnorm"])
def test_stacked_equals_looped(name: str, batch_norm: bool) -> None:
    method, model, data = toy.method(name), a_model(batch_norm=batch_norm), toy.toy()
    for cohort in (None, 2):
        assert_alike(looped(name, batch_norm=batch_norm), toy.stacked(method, model, data, cohort, **RUN))


@every_method
@pytest.mark.parametrize("batch_norm", [False, True], ids=["plain", "batchnorm"])
def test_streams_equal_looped(name: str, batch_norm: bool) -> None:
    """Recorded and replayed, for clients of several sizes on fewer branches."""
    method, model, data = toy.method(name), a_model(batch_norm=batch_norm), toy.toy()
    assert_alike(looped(name, batch_norm=batch_norm), toy.streams(method, model, data, **RUN))


@every_method
@pytest.mark.parametrize(("batch_norm", "cohort"), [(False, None), (True, 2)], ids=["plain", "batchnorm"])
def test_dropout_and_momentum_that_is_kept(name: str, batch_norm: bool, cohort: int | None) -> None:
    method, data = toy.method(name, keep_momentum=True), toy.toy()
    model = a_model(batch_norm=batch_norm, dropout=0.3)
    expected = toy.looped(method, model, data, **RUN)
    assert_alike(expected, toy.stacked(method, model, data, cohort, **RUN))
    if batch_norm:  # streams are the slowest here; without BatchNorm, dropout is the same layer
        assert_alike(expected, toy.streams(method, model, data, **RUN))
    without, _ = looped(name, batch_norm=batch_norm, keep_momentum=True)  # layers are numbered differently, so by place
    expected, _ = expected
    assert any(not torch.equal(a, b) for a, b in zip(expected.values(), without.values(), strict=True))


@every_method
@pytest.mark.parametrize("keep", [False, True], ids=["reset", "keep"])
def test_adamw_stacked_equals_looped(name: str, keep: bool) -> None:
    settings = {"optimizer": "adamw", "momentum": 0.0, "lr": 0.01, "keep_momentum": keep}
    method, model, data = toy.method(name, **settings), a_model(), toy.toy()
    if method.needs_sgd:
        with pytest.raises(CoterieError, match=f"{method.title} needs optimizer=sgd, got adamw"):
            Looped(method, model, data, 7, processes=1).rehearse()
        return
    expected, _ = toy.looped(method, model, data, **RUN)
    found, _ = toy.stacked(method, model, data, **RUN)
    assert toy.distance(expected, found) < 1e-10
    if not keep:
        sgd, _ = toy.looped(toy.method(name, momentum=0.0, lr=0.01), model, data, **RUN)
        common = expected.keys() & sgd.keys()
        assert any(expected[n].shape == sgd[n].shape and not torch.equal(expected[n], sgd[n]) for n in common)


@every_method
@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [
        *itertools.product(("regression", "next-token"), ("sgd", "adamw")),
        ("multi-label", "sgd"),
        ("segmentation", "sgd"),
    ],
)
def test_tasks_stacked_equal_looped(name: str, kind: str, optimizer: str) -> None:
    settings = {} if optimizer == "sgd" else {"optimizer": "adamw", "momentum": 0.0, "lr": 0.01}
    method, (data, model) = toy.method(name, **settings), of_task(kind)
    if method.needs_classes:
        with pytest.raises(CoterieError, match=f"{method.title} needs one class per sample, .* {kind}"):
            Looped(method, model, data, 7, processes=1).rehearse()
        return
    if method.needs_sgd and optimizer != "sgd":
        return
    once = {"rounds": 1} if kind in ("multi-label", "segmentation") else {}
    expected, history = toy.looped(method, model, data, **RUN | once)
    found, side_by_side = toy.stacked(method, model, data, **RUN | once)
    assert toy.distance(expected, found) < 1e-10
    for a, b in zip(history, side_by_side, strict=True):
        for point, scores in a.scores.items():
            torch.testing.assert_close(scores.value, b.scores[point].value, rtol=1e-9, atol=1e-12)


@every_method
def test_batchnorm_leaves_padding_out(name: str) -> None:
    """Clients of unlike size in one cohort; their last batches, and the parts they are tested in, end in padding."""
    data = toy.toy(train=(13, 16, 10), test=(125, 141, 130))
    method = toy.method(name, local_epochs=1)
    model = make_model(toy.mixing_network(), toy.SHAPE, toy.CLASSES).to("cpu", torch.float64)
    clients, everyone = Stacked(method, model, data, 7), torch.arange(3)
    for request in (Request("train"), Request("score", "test"), Request("score_global", "test")):
        assert [c.clients.tolist() for c in clients.cohorts(request, everyone)] == [[0, 1, 2]]
    found, side_by_side = toy.outcome(clients, rounds=2, join_ratio=1.0)
    expected, history = toy.looped(method, model, data, rounds=2, join_ratio=1.0)
    assert toy.distance(expected, found) < 1e-10
    for a, b in zip(history, side_by_side, strict=True):
        for point, scores in a.scores.items():
            assert torch.equal(scores.weighted, b.scores[point].weighted)
            torch.testing.assert_close(scores.loss, b.scores[point].loss, rtol=1e-9, atol=0)


@every_method
def test_stacked_equals_looped_in_float32(name: str) -> None:
    found, _ = toy.stacked(toy.method(name), a_model(torch.float32), toy.toy(), **RUN)
    assert toy.distance(looped(name, torch.float32)[0], found) < 1e-4


@every_method
def test_drop_last(name: str) -> None:
    data = toy.toy(train=(13, 20, 9, 31, 8))
    method, model = toy.method(name, drop_last=True), a_model()
    expected, _ = toy.looped(method, model, data, **RUN)
    found, _ = toy.stacked(method, model, data, **RUN)
    assert toy.distance(expected, found) < 1e-10


@every_method
def test_number_of_processes_changes_nothing(name: str) -> None:
    method, model, data = toy.method(name), a_model(torch.float32), toy.toy()
    toy.assert_same(looped(name, torch.float32)[0], toy.looped(method, model, data, processes=3, **RUN)[0])


@every_method
def test_one_client_only(name: str) -> None:
    method, model, data = toy.method(name), a_model(), toy.toy(train=(9,), test=(5,))
    expected, _ = toy.looped(method, model, data, rounds=2, join_ratio=1.0)
    found, _ = toy.stacked(method, model, data, rounds=2, join_ratio=1.0)
    assert toy.distance(expected, found) < 1e-10


@every_method
def test_padding_changes_nothing(name: str) -> None:
    """A client's answer does not depend on who shares its cohort: alone there is no padding."""
    method, model, data = toy.method(name), a_model(), toy.toy()
    together, alone = (Stacked(method, model, data, 0, cohort=c) for c in (5, 1))
    server = method.server_init(model, together.census)
    for clients in (together, alone):
        clients.join(method.server_welcome(server))
    everyone = torch.arange(5)
    downs = send(method, server, everyone)
    a, b = (clients.train(everyone, downs, Turn(0)).ups for clients in (together, alone))
    assert toy.distance(tree.flatten(a), tree.flatten(b)) < 1e-12


@every_method
@pytest.mark.parametrize("kind", [Looped, Stacked])
def test_clients_do_not_depend_on_their_place(name: str, kind: Any) -> None:
    """Each participant gets the same answer, whoever trains beside it and wherever it stands."""
    method, model, data = toy.method(name), a_model(), toy.toy()

    def answers(ids: list[int]) -> dict[int, tree.Tree]:
        clients = kind(method, model, data, 0, **({"processes": 1} if kind is Looped else {}))
        server = method.server_init(model, clients.census)
        clients.join(method.server_welcome(server))
        got = clients.train(torch.tensor(ids), send(method, server, torch.tensor(ids)), Turn(0))
        trained = {i: clients.states[i] for i in ids}
        clients.close()
        return {i: tree.flatten((tree.pick(got.ups, row), trained[i])) for row, i in enumerate(got.clients.tolist())}

    all_five, three = answers([0, 1, 2, 3, 4]), answers([1, 3, 4])
    for i in (1, 3, 4):
        assert toy.distance(all_five[i], three[i]) < 1e-12


@every_method
def test_those_who_do_not_join_keep_their_state(name: str) -> None:
    method, model, data = toy.method(name, keep_momentum=True), a_model(), toy.toy()
    clients = Stacked(method, model, data, 0)
    server = method.server_init(model, clients.census)
    clients.join(method.server_welcome(server))
    before = [tree.flatten(clients.states[i]) for i in range(5)]
    joined = torch.tensor([1, 3])
    clients.train(joined, send(method, server, joined), Turn(0))
    for i in (0, 2, 4):
        toy.assert_same(before[i], tree.flatten(clients.states[i]))


@every_method
def test_evaluation_changes_nothing(name: str) -> None:
    seldom, _ = toy.looped(toy.method(name), a_model(torch.float32), toy.toy(), evaluate_every=2, **RUN)
    toy.assert_same(looped(name, torch.float32)[0], seldom)


@every_method
def test_the_same_seed_gives_the_same_run(name: str) -> None:
    method, model, data = toy.method(name), a_model(torch.float32), toy.toy()
    first, _ = looped(name, torch.float32)
    torch.manual_seed(2)
    toy.assert_same(first, toy.looped(method, model, data, **RUN)[0])
    assert toy.distance(first, toy.looped(method, model, data, rounds=2, seed=4)[0]) > 0


@every_method
def test_nobody_writes_into_what_was_given(name: str) -> None:
    """Functions are pure: model, state, message and server are as before."""
    method, model, data = toy.method(name, keep_momentum=True), a_model(batch_norm=True), toy.toy()
    clients = Looped(method, model, data, 0, processes=1)
    server = method.server_init(clients.model, clients.census)
    clients.join(method.server_welcome(server))
    everyone = torch.arange(5)
    downs, states, request = (
        send(method, server, everyone),
        clients.states.take(everyone),
        Request("train", turn=Turn(0)),
    )
    given = (clients.model.start, states, downs, server)
    copies = tree.apply(lambda t: t.clone(), given)
    _, ups = clients.compute(request, clients.cohorts(request, everyone)[0], states, downs)
    method.server_receive(server, everyone, ups)
    toy.assert_same(tree.flatten(copies), tree.flatten(given))


@every_method
def test_state_does_not_travel(name: str) -> None:
    """What a client remembers and what it sends are different types, and share no field of the same content."""
    hints = typing.get_type_hints(METHODS[name].client_train)
    state, up = typing.get_args(hints["return"])
    assert state is not up
    assert not any(kind in (state, tuple[state]) for kind in typing.get_type_hints(up).values())


@every_method
def test_bytes_are_those_of_the_paper(name: str) -> None:
    model = a_model(torch.float32)
    sizes = [sum(t.numel() for t in part.values()) for part in model.start]
    up, down = (formula(*sizes, toy.CLASSES, model.dim) for formula in traffic.NUMBERS[name])
    _, history = looped(name, torch.float32)
    assert all(r.bytes_up == 3 * 4 * up and r.bytes_down == 3 * 4 * down for r in history if "train" in r.seconds)


def broken(data: FederatedData, clients: tuple[int, ...]) -> FederatedData:
    """The same data, but some clients' pixels are not numbers."""
    x = data.train.x.double() / 255
    for client in clients:
        start = data.train.starts[client]
        x[start : start + data.train.sizes[client]] = float("nan")
    return dataclasses.replace(data, train=dataclasses.replace(data.train, x=x))


@every_method
@pytest.mark.parametrize("kind", [Looped, Stacked])
def test_clients_that_diverge_are_left_out(name: str, kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The first one, and one of the middle."""
    data, lost = broken(toy.toy(augmented=False), (0, 3)), (0, 3)
    alone = {"processes": 1} if kind is Looped else {}
    found, history = toy.outcome(kind(toy.method(name), a_model(), data, 7, **alone), rounds=2, join_ratio=1.0)
    assert all(r.left_out == lost for r in history if "train" in r.seconds)
    assert all(f"client {client} is left out" in caplog.text for client in lost)
    made_at_the_end = tuple(f"states.{i}.{own}" for i in lost for own in ("tuned", "datastore"))  # from its own samples
    assert all(t.isfinite().all() for n, t in found.items() if not n.startswith(made_at_the_end))


@every_method
def test_everything_frozen_is_a_field(name: str) -> None:
    """A method is a frozen dataclass, and remembers nothing."""
    method = METHODS[name]()
    with pytest.raises(dataclasses.FrozenInstanceError):
        method.train = LocalTraining()  # type: ignore[misc]
    before = dict(vars(method))
    federate(Looped(method, a_model(), toy.toy(), 0, processes=1), Settings(rounds=1))
    assert vars(method) == before
