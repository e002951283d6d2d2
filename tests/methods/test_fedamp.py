"""FedAMP and HeurFedAMP against the equations of the paper, in NumPy and with torch's SGD."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.core import tree
from coterie.core.errors import CoterieError
from coterie.core.training import LocalTraining
from coterie.execution import Turn
from coterie.methods.fedamp import FedAMP, Server, Up
from coterie.methods.local import Local
from tests import plain, toy

SGD = LocalTraining(local_epochs=2, batch_size=8, lr=0.05, momentum=0.5, weight_decay=1e-3)
SETTINGS = {"pull": 3.0, "step": 0.5, "width": 2.0}  # so that models of the toy attend to each other


def vector(model: dict[str, Tensor]) -> np.ndarray:
    return np.concatenate([t.numpy().ravel() for t in model.values()])


def attention(models: list[dict[str, Tensor]], joined: set[int], heuristic: bool) -> np.ndarray:
    """ξ by loops over pairs."""
    m = len(models)
    found = np.zeros((m, m))
    for i in range(m):
        others = [j for j in joined if j != i]
        for j in others:
            a, b = vector(models[i]), vector(models[j])
            if heuristic:
                cosine = a @ b / (np.linalg.norm(a) * np.linalg.norm(b))
                found[i, j] = np.exp(4.0 * cosine)
            else:
                found[i, j] = SETTINGS["step"] * np.exp(-np.sum((a - b) ** 2) / SETTINGS["width"]) / SETTINGS["width"]
        if heuristic:
            found[i] *= (1 - 0.3) / max(found[i].sum(), 1e-300)
        elif found[i].sum() > 1:
            found[i] /= found[i].sum()
        found[i, i] = 1 - found[i].sum()
    return found


@pytest.mark.parametrize("heuristic", [False, True], ids=["distance", "cosine"])
def test_three_rounds_equal_the_plain_implementation(heuristic: bool) -> None:
    net = toy.network().double()
    models, joined, weights = [plain.copy(net) for _ in range(5)], set[int](), np.eye(5)
    for participants, turn in plain.ROUNDS:
        clouds = [plain.mean(models, row.tolist()) for row in weights]
        for i in participants:
            models[i] = client(clouds[i], i, turn)
        joined |= set(participants)
        weights = attention(models, joined, heuristic)
    kind = {"attention": "cosine", "own_share": 0.3, "sharpness": 4.0} if heuristic else {}
    server, clients = plain.federation(FedAMP(train=SGD, **SETTINGS, **kind), plain.data(), toy.model())  # type: ignore[arg-type]
    np.testing.assert_allclose(server.attention.numpy(), weights, rtol=1e-9, atol=1e-12)
    assert 0.05 < weights[0, 1] < 0.95
    for i, model in enumerate(models):
        plain.assert_close(plain.named(clients.states[i].weights, net), model)
        plain.assert_close(plain.named(tree.pick(server.models, i), net), model)


def client(cloud: dict[str, Tensor], i: int, turn: Turn) -> dict[str, Tensor]:
    """SGD from the cloud model u on f(w) + λ/(2α) |w - u|²."""
    net = toy.network().double()
    net.load_state_dict(cloud)
    optimiser = plain.optimiser(net.parameters(), SGD, turn)
    for x, y in plain.batches(plain.data(), i, turn, SGD):
        optimiser.zero_grad()
        apart = sum(((p - cloud[n]) ** 2).sum() for n, p in net.named_parameters())
        (F.cross_entropy(net(x), y) + SETTINGS["pull"] / (2 * SETTINGS["step"]) * apart).backward()
        optimiser.step()
    return plain.copy(net)


def test_with_identity_attention_it_is_local_training_with_a_proximal_term() -> None:
    """Every cloud model is the client's own; without the pull, it is Local."""
    own = {"attention": "cosine", "own_share": 1.0}
    server, clients = plain.federation(FedAMP(train=SGD, pull=0.0, **own), plain.data(), toy.model())  # type: ignore[arg-type]
    _, alone = plain.federation(Local(train=SGD), plain.data(), toy.model())
    assert torch.equal(server.attention, torch.eye(5, dtype=torch.float64))
    for i in range(5):
        ours, theirs = (tree.flatten(found.states[i].weights) for found in (clients, alone))
        assert toy.distance(ours, theirs) < 1e-14
    _, pulled = plain.federation(FedAMP(train=SGD, **SETTINGS, **own), plain.data(), toy.model())  # type: ignore[arg-type]
    models = [plain.copy(toy.network().double()) for _ in range(5)]
    for participants, turn in plain.ROUNDS:
        for i in participants:
            models[i] = client(models[i], i, turn)
    for i, model in enumerate(models):
        plain.assert_close(plain.named(pulled.states[i].weights, toy.network()), model)


@pytest.mark.parametrize("changes", [{"pull": 30.0}, {"step": 0.05}, {"width": 20.0}], ids=str)
def test_every_setting_counts(changes: dict[str, float]) -> None:
    """Elsewhere the proximal term has no gradient and the cloud model is not loaded, so that none does."""
    one, other = (
        plain.federation(FedAMP(train=SGD, **(SETTINGS | own)), plain.data(), toy.model())[0]  # type: ignore[arg-type]
        for own in ({}, changes)
    )
    assert toy.distance(tree.flatten(one.models), tree.flatten(other.models)) > 1e-4


def received(method: FedAMP, *values: float) -> Server:
    """Models whose only number that is not zero is one of the head's biases."""
    server, _ = plain.federation(method, toy.toy(train=(8, 8), test=(3, 3)), toy.model(), [])
    zero = tree.apply(torch.zeros_like, toy.model().start)
    models = [tree.apply(torch.clone, zero) for _ in values]
    for model, value in zip(models, values, strict=True):
        model.head["bias"][0] = value
    return method.server_receive(server, torch.tensor([0, 1]), Up(tree.stack(models)))


def test_two_clients_by_hand() -> None:
    """At distance 2: ξ_12 = α/σ exp(-4/σ), and client 1 gets 1 + 2 ξ_12."""
    method = FedAMP(step=3.0, width=6.0)
    server, weight = received(method, 1.0, 3.0), 0.5 * np.exp(-4 / 6)
    expected = torch.tensor([[1 - weight, weight], [weight, 1 - weight]], dtype=torch.float64)
    torch.testing.assert_close(server.attention, expected)
    sent = [float(method.server_send(server, torch.tensor(i)).weights.head["bias"][0]) for i in (0, 1)]
    assert sent == pytest.approx([1 + 2 * weight, 3 - 2 * weight])


def test_weights_of_the_others_sum_to_at_most_one() -> None:
    """A step α > σ at distance 0 would leave the own model a negative weight."""
    server = received(FedAMP(step=10.0, width=1.0), 1.0, 1.0)
    assert server.attention.tolist() == [[0.0, 1.0], [1.0, 0.0]]


def test_newcomers_get_the_mean_of_those_who_joined() -> None:
    method = FedAMP(train=SGD)
    server, _ = plain.federation(method, plain.data(), toy.model(), plain.ROUNDS[:1])
    found = method.server_greet(server).weights
    three = tree.pick(server.models, torch.tensor([0, 1, 3]))
    assert toy.distance(tree.flatten(found), tree.flatten(tree.average(three, torch.ones(3)))) < 1e-14
    nobody, _ = plain.federation(method, plain.data(), toy.model(), [])
    assert toy.distance(tree.flatten(method.server_greet(nobody).weights), tree.flatten(toy.model().start)) < 1e-14


def test_heurfedamp_stacked_equals_looped() -> None:
    method, model = toy.method("fedamp", attention="cosine"), toy.model(batch_norm=True)
    looped, stacked = (run(method, model, toy.toy())[0] for run in (toy.looped, toy.stacked))
    assert toy.distance(looped, stacked) < 1e-10


def test_an_unknown_attention_is_refused() -> None:
    with pytest.raises(CoterieError, match="unknown attention 'dot'"):
        FedAMP(attention="dot")
