"""What of BatchNorm travels: everything, all but running statistics, or nothing."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import coterie
from coterie.core import tree
from coterie.core.batchnorm import POLICIES, KeptNorms, keep_norms
from coterie.core.data import FederatedData, Split
from coterie.core.errors import CoterieError
from coterie.core.method import Census
from coterie.core.model import Weights, make_model
from coterie.core.rehearsal import rehearse
from coterie.deploy.server import check
from coterie.execution import Looped
from coterie.federation import Settings, federate
from coterie.methods import METHODS
from coterie.models import Network
from tests import toy

LOCAL_POLICIES = POLICIES[1:]
STATISTICS, LAYERS = 2 * 4, 4 * 4  # numbers of the toy's BatchNorm with 4 channels
CASES = [(name, p) for name in ("fedavg", "fedrep", "ditto", "fedpac", "scaffold") for p in LOCAL_POLICIES]
REFUSED = {
    *((name, policy) for name in ("fedfomo", "hypcluster", "apple", "fedgen") for policy in LOCAL_POLICIES),
    *((name, "local") for name in ("scaffold", "feddyn", "pfedhn", "fedcac")),
}
RUN: dict[str, Any] = {"rounds": 3, "local_epochs": 1, "batch_size": 8, "seed": 7, "progress": False}
WHERE = {"backend": toy.IN_TURN}


def kept(name: str, policy: str, **changes: Any) -> KeptNorms:
    made = keep_norms(toy.method(name, **changes), policy, toy.model(batch_norm=True))
    assert isinstance(made, KeptNorms)
    return made


def test_averaged_is_the_method_itself() -> None:
    method = toy.method("fedavg")
    assert keep_norms(method, "averaged", toy.model(batch_norm=True)) is method
    assert Settings().batchnorm == "averaged"


@pytest.mark.parametrize(("name", "policy"), [case for case in CASES if case not in REFUSED])
def test_stacked_equals_looped_and_less_is_sent(name: str, policy: str) -> None:
    method, model, data = kept(name, policy), toy.model(batch_norm=True), toy.toy()
    expected, history = toy.looped(method, model, data, rounds=2)
    found, same = toy.stacked(method, model, data, cohort=3, rounds=2)
    assert toy.distance(expected, found) < 1e-10
    assert [toy.rows(s)[:3] for s in history[-1].scores.values()] == [toy.rows(s)[:3] for s in same[-1].scores.values()]
    before, after = toy.looped(method.inner, model, data, rounds=1)[1][0], history[0]
    kept_bytes = 8 * (STATISTICS if policy == "local-statistics" else LAYERS) * len(after.participants)
    assert (before.bytes_up - after.bytes_up, before.bytes_down - after.bytes_down) == (kept_bytes, kept_bytes)
    assert ("global", "test") not in after.scores  # it would lack what clients keep


@pytest.mark.long
def test_streams_equal_looped() -> None:
    method, model, data = kept("fedrep", "local"), toy.model(batch_norm=True), toy.toy()
    expected = toy.looped(method, model, data, rounds=2)[0]
    assert toy.distance(expected, toy.streams(method, model, data, rounds=2)[0]) < 1e-10


def test_fedavg_with_local_layers_is_fedbn() -> None:
    """FedBN is FedAvg whose clients keep their normalization layers: another implementation of the same numbers."""
    model, data = toy.model(batch_norm=True), toy.toy()
    ours = Looped(kept("fedavg", "local"), model, data, 7, processes=1)
    theirs = Looped(toy.method("fedbn"), model, data, 7, processes=1)
    settings = Settings(rounds=3, join_ratio=0.6, seed=7)
    (server, history), (other, expected) = (federate(backend, settings) for backend in (ours, theirs))
    sent = tree.flatten(server.weights)
    assert all(torch.allclose(sent[name], t, atol=1e-12) for name, t in tree.items(other.shared))
    for client in range(5):
        norms = {name.removeprefix("weights."): t for name, t in ours.states[client].norms.items()}
        own = tree.flatten(theirs.states[client].personal)
        assert norms.keys() == own.keys()
        assert all(torch.allclose(norms[name], own[name], atol=1e-12) for name in own)
    assert [r.score("pre", "test") for r in history[:3]] == [r.score("pre", "test") for r in expected]


def test_local_statistics_by_plain_torch() -> None:
    """Two clients, one full batch per round: each module keeps its statistics, and all weights are averaged."""
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(20, 6, generator=draw, dtype=torch.float64), torch.randint(0, 3, (20,), generator=draw)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)).double()
    split = Split(x, y, (12, 8))
    result = coterie.run(
        "fedavg", FederatedData("two", 3, split, split), network, rounds=3, local_epochs=1, batch_size=12, lr=0.1,
        momentum=0.0, weight_decay=0.0, batchnorm="local-statistics", progress=False, **WHERE,
    )  # fmt: skip
    nets = [copy.deepcopy(network) for _ in split.ranges()]
    for _ in range(3):
        for net, own in zip(nets, split.ranges(), strict=True):
            net.train()
            loss = F.cross_entropy(net(x[own]), y[own])
            for p, slope in zip(net.parameters(), torch.autograd.grad(loss, list(net.parameters())), strict=True):
                p.data -= 0.1 * slope
        for together in zip(*(net.parameters() for net in nets), strict=True):
            mean = 0.6 * together[0].data + 0.4 * together[1].data
            for p in together:
                p.data = mean.clone()
    assert not torch.allclose(nets[0][1].running_mean, nets[1][1].running_mean)
    states = [result.states[i]._replace(state=result.states[i].state._replace(tuned=())) for i in (0, 1)]
    for i, (net, own) in enumerate(zip(nets, split.ranges(), strict=True)):
        with torch.no_grad():
            found = result.method.client_predict(result.model, states[i], result.down(i), x[own])
            assert torch.allclose(found, net.eval()(x[own]), atol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("policy", LOCAL_POLICIES)
def test_every_method_is_right_or_refused(policy: str) -> None:
    model, data = toy.model(batch_norm=True), toy.toy()
    refused, reasons = set(), []
    for name in METHODS:
        try:
            rehearse(keep_norms(toy.method(name), policy, model), model, data.train.x[:6], data.train.y[:6])
        except CoterieError as error:
            refused.add((name, policy))
            reasons.append(str(error).partition(f"{METHODS[name].title} does not support batchnorm={policy}: "))
    assert all(before == "" and reason for before, _, reason in reasons)
    assert refused == {case for case in REFUSED if case[1] == policy}


@pytest.mark.parametrize("name", ["fedavg", "mr-mtl"])
def test_newcomers_start_from_the_initial_statistics(name: str) -> None:
    method, model, data = kept(name, "local-statistics"), toy.model(batch_norm=True), toy.toy()
    backend = Looped(method, model, data, 7, processes=1)
    server, _ = federate(backend, Settings(rounds=2, seed=7))
    newcomer = Looped(method, model, data.pick([0]), 7, processes=1)
    newcomer.join(method.server_welcome(server))
    found = tree.flatten(newcomer.states[0])
    statistics = {n: t for n, t in found.items() if tree.is_statistic(n)}
    assert statistics
    for name, t in statistics.items():
        assert torch.equal(t, torch.zeros(4) if name.endswith("mean") else torch.ones(4)), name
    trained = tree.flatten(backend.states[0].norms)
    assert not any(torch.equal(t, statistics[f"norms.{name}"]) for name, t in trained.items())


@pytest.mark.long
@pytest.mark.parametrize("policy", LOCAL_POLICIES)
def test_a_run_folder_resumes_exactly_and_gives_its_models(policy: str, tmp_path: Path) -> None:
    data, network = toy.toy(), toy.network(batch_norm=True)

    def run(folder: str, rounds: int, **more: Any) -> coterie.Result:
        settings = RUN | WHERE | {"rounds": rounds, "join_ratio": 0.6, "batchnorm": policy, "out": tmp_path / folder}
        return coterie.run("ditto", data, network, **(settings | more))

    whole = run("whole", 4)
    run("cut", 2)
    resumed = run("cut", 4, exist="resume")
    toy.assert_same(everything(whole), everything(resumed))
    opened = coterie.load_run(tmp_path / "whole", model=network)
    x = data.test.x[:5]
    for client in (0, 3):
        expected = whole.personal_model(client)(x)
        assert torch.equal(opened.personal_model(client)(x), expected)
        assert torch.allclose(
            whole.personal_model(client).network()(whole.personal_model(client).preprocess(x)), expected
        )


def everything(result: coterie.Result) -> tree.Tree:
    states = {str(i): result.states[i] for i in range(5)}
    return tree.flatten({"server": result.server, "states": states})


def test_a_composite_model_and_fine_tuning_use_own_statistics() -> None:
    """FedRoD adds two heads, FedAvg-FT fine-tunes: both begin with what the client keeps."""
    data, network = toy.toy(augmented=False), toy.network(batch_norm=True)
    for name in ("fedrod", "fedavg"):
        result = coterie.run(name, data, network, batchnorm="local-statistics", **RUN, **WHERE)
        state, x = result.states[1], data.test.x[:6]
        with torch.no_grad():
            expected = result.method.client_predict(result.model, state, result.down(1), x)
            assert torch.allclose(result.personal_model(1)(x), expected, atol=1e-6)
            other = state._replace(norms=tree.apply(lambda t: t + 1, state.norms))
            moved = result.method.client_predict(result.model, other, result.down(1), x)
        assert torch.equal(moved, expected) is (name == "fedavg")  # the fine-tuned model has its own


@pytest.mark.parametrize(
    "protection", [{"robust": "median"}, {"dp": "client", "dp_noise": 0.1}], ids=["robust", "dp-client"]
)
def test_protections_see_what_is_sent_only(protection: dict[str, Any]) -> None:
    settings = RUN | WHERE | protection
    result = coterie.run("fedavg", toy.toy(), toy.network(batch_norm=True), batchnorm="local", **settings)
    numbers = sum(t.numel() for t in tree.leaves(result.model.start)) - LAYERS + 1  # and that of samples
    assert result.history[0].bytes_up == 4 * numbers * 5


def test_what_makes_no_sense_is_refused() -> None:
    data, network = toy.toy(), toy.network(batch_norm=True)
    with pytest.raises(CoterieError, match="batchnorm=local needs BatchNorm layers that are trained, and this network"):
        coterie.run("fedavg", data, toy.network(), batchnorm="local", **RUN)
    unsteady = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(144, track_running_stats=False), nn.Linear(144, 4))
    with pytest.raises(CoterieError, match="needs BatchNorm layers with running statistics, and this network has none"):
        coterie.run("fedavg", data, unsteady, batchnorm="local-statistics", **RUN)
    with pytest.raises(CoterieError, match="unknown batchnorm 'locale': did you mean 'local'"):
        coterie.run("fedavg", data, network, batchnorm="locale", **RUN)
    with pytest.raises(CoterieError, match="encrypt and batchnorm=local cannot be combined"):
        coterie.run("fedavg", data, network, batchnorm="local", encrypt="ckks", **RUN)
    with pytest.raises(CoterieError, match="--batchnorm local works in simulations only"):
        check(Settings(batchnorm="local"))


def test_a_correction_with_a_name_of_its_own_is_refused() -> None:
    """A method of a user whose messages look symmetric, but hold something else than weights."""
    FedAvg = METHODS["fedavg"]

    class Shifted(FedAvg):  # type: ignore[misc, valid-type]
        def server_init(self, model: Any, census: Census) -> Any:
            zeros = Weights(*({n: torch.zeros_like(t) for n, t in part.items()} for part in model.start))
            return super().server_init(replace(model, start=zeros), census)

    with pytest.raises(CoterieError, match=r"Shifted does not support batchnorm=local: its server sends 'weights\.enc"):
        keep_norms(Shifted(), "local", toy.model(batch_norm=True))


def test_a_head_that_is_sent_but_never_received_is_refused() -> None:
    encoder, head = nn.Sequential(nn.Flatten(), nn.Linear(144, 8)), nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 4))
    model = make_model(Network(encoder, head), toy.SHAPE, toy.CLASSES)
    assert "head.0.running_mean" in tree.flatten(model.start)
    data = toy.toy()
    for averaged in (False, True):
        method = keep_norms(toy.method("fedrep", average_heads=averaged), "local-statistics", model)
        if not averaged:
            rehearse(method, model, data.train.x[:6], data.train.y[:6])
            continue
        with pytest.raises(
            CoterieError, match=r"FedRep does not .* clients do not receive what they send as 'personal"
        ):
            rehearse(method, model, data.train.x[:6], data.train.y[:6])


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("averaged", "batchnorm: averaged: weights and running statistics of BatchNorm are sent and averaged"),
        ("local-statistics", "batchnorm: local-statistics: running statistics of BatchNorm stay with each client"),
        ("local", "batchnorm: local: BatchNorm layers stay with each client"),
    ],
)
def test_the_first_lines_name_the_policy(policy: str, words: str) -> None:
    lines: list[str] = []
    settings = RUN | WHERE | {"rounds": 1, "show": lines.append}
    coterie.run("fedavg", toy.toy(), toy.network(batch_norm=True), batchnorm=policy, **settings)
    assert sum(line.startswith(words) for line in lines) == 1
    del lines[:]
    coterie.run("fedavg", toy.toy(), toy.network(), **settings)
    assert not any(line.startswith("batchnorm") for line in lines)
