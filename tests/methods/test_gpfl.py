"""GPFL against modules with three optimisers, as its authors train it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.core.data import FederatedData
from coterie.core.errors import CoterieError
from coterie.core.training import LocalTraining
from coterie.execution import Turn
from coterie.methods.gpfl import GPFL, Server, norm
from tests import plain, toy

SGD = LocalTraining(local_epochs=2, batch_size=8, lr=0.05, momentum=0.5, weight_decay=1e-3)
D = 8


class Valve(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.LayerNorm(D)).double()
        self.shift = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.LayerNorm(D)).double()

    def forward(self, z: Tensor, condition: Tensor) -> Tensor:
        return torch.relu(z * (self.scale(condition) + 1) + self.shift(condition))


def named(valve: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our valve under the names of the module."""
    return {
        f"{part}.{place}.{kind}": valve[f"{part}.{norm}{kind}"]
        for part in ("scale", "shift")
        for place, norm in ((0, ""), (2, "norm."))
        for kind in ("weight", "bias")
    }


class Plain:
    """The server's modules, and what every client has of its own."""

    def __init__(self, server: Server, data: FederatedData, method: GPFL) -> None:
        self.data, self.method, count = data, method, data.num_clients
        self.net: Any = toy.network().double()
        self.table, self.valve = server.shared.table.clone(), Valve()
        self.valve.load_state_dict(named(server.shared.valve))
        self.heads = [copy.deepcopy(self.net[-1]) for _ in range(count)]
        self.tables: list[Tensor | None] = [None] * count
        self.head, self.condition = self.net[-1], torch.zeros(D, dtype=torch.float64)

    def conditions(self, i: int) -> tuple[Tensor, Tensor]:
        """p_i and g_i."""
        table = self.tables[i] if self.method.conditions == "previous" else self.table
        if table is None:
            return torch.zeros(D, dtype=torch.float64), torch.zeros(D, dtype=torch.float64)
        _, y = self.data.train.client(i)
        personal = sum(float((y == k).double().mean()) * table[k] for k in range(toy.CLASSES))
        return personal, sum(row / toy.CLASSES for row in table)  # type: ignore[return-value]

    def client(self, i: int, turn: Turn) -> tuple[Any, ...]:
        personal, generic = self.conditions(i)
        body, head, valve = copy.deepcopy(self.net[:-1]), self.heads[i], copy.deepcopy(self.valve)
        table = nn.Parameter(self.table.clone())
        heavy = SGD.but(weight_decay=self.method.table_decay)
        optimisers = [
            plain.optimiser([*body.parameters(), *head.parameters()], SGD, turn),
            plain.optimiser([table], heavy, turn),
            plain.optimiser(valve.parameters(), heavy, turn),
        ]
        for x, y in plain.batches(self.data, i, turn, SGD):
            z = body(x)
            loss = F.cross_entropy(head(valve(z, personal)), y)
            steered = valve(z, generic)
            cosines = torch.stack([F.cosine_similarity(steered, row[None], dim=1) for row in table], 1)
            loss = loss + F.cross_entropy(cosines, y) + self.method.pull * torch.norm(steered - self.table[y])
            for optimiser in optimisers:
                optimiser.zero_grad()
            loss.backward()
            for optimiser in optimisers:
                optimiser.step()
        self.tables[i] = table.detach().clone()
        return plain.copy(body), table.detach(), plain.copy(valve), plain.copy(head), personal

    def round(self, joined: list[int], turn: Turn) -> None:
        samples = [self.data.train.sizes[i] for i in joined]
        bodies, tables, valves, heads, conditions = zip(*(self.client(i, turn) for i in joined), strict=True)
        self.net[:-1].load_state_dict(plain.mean(bodies, samples))
        self.valve.load_state_dict(plain.mean(valves, samples))
        (self.table,) = plain.mean([{"": t} for t in tables], samples).values()
        self.head = nn.Linear(D, toy.CLASSES).double()
        self.head.load_state_dict(plain.mean(heads, samples))
        (self.condition,) = plain.mean([{"": c} for c in conditions], samples).values()


@pytest.mark.parametrize("conditions", ["previous", "current"])
@pytest.mark.parametrize("table_decay", [0.1, 0.0])
def test_rounds_equal_the_plain_implementation(conditions: str, table_decay: float) -> None:
    method = GPFL(train=SGD, conditions=conditions, pull=0.5, table_decay=table_decay, average_heads=True)
    data, model = plain.data(), toy.model()
    start, _ = plain.federation(method, data, model, rounds=())
    expected = Plain(start, data, method)
    for joined, turn in plain.ROUNDS:
        expected.round(joined, turn)
    server, clients = plain.federation(method, data, model)
    plain.assert_close(server.shared.encoder, plain.copy(expected.net[:-1]))
    plain.assert_close(named(server.shared.valve), plain.copy(expected.valve))
    plain.assert_close({"": server.shared.table}, {"": expected.table})
    for i in range(5):
        plain.assert_close(clients.states[i].head, plain.copy(expected.heads[i]))
        x, _ = data.test.client(i)
        z = expected.net[:-1]((x.double() / 255 - 0.5) / 0.5)
        mine = method.client_predict(model, clients.states[i], method.server_send(server, torch.tensor(i)), x)
        theirs = expected.heads[i](expected.valve(z, expected.conditions(i)[0]))
        torch.testing.assert_close(mine, theirs.detach())
        shared = method.server_predict(model, server, x)
        torch.testing.assert_close(shared, expected.head(expected.valve(z, expected.condition)).detach())


def test_there_is_no_global_model_without_heads() -> None:
    """And then they do not travel, nor do conditions."""
    method, data, model = GPFL(train=SGD), plain.data(), toy.model()
    server, _ = plain.federation(method, data, model, rounds=())
    assert method.server_predict(model, server, data.test.client(0)[0]) is None


def test_the_first_table_and_valve_are_drawn_as_torch_draws_them() -> None:
    server, _ = plain.federation(GPFL(train=SGD), plain.data(), toy.model(), rounds=())
    table, valve = server.shared.table, server.shared.valve
    assert 0.6 < table.std() < 1.4  # a standard normal
    assert table.abs().max() > 1
    for part in ("scale", "shift"):
        assert 0.3 < valve[f"{part}.weight"].abs().max() <= D**-0.5
        assert (valve[f"{part}.norm.weight"] == 1).all()
        assert (valve[f"{part}.norm.bias"] == 0).all()
    assert not torch.equal(valve["scale.weight"], valve["shift.weight"])


def test_the_norm_leaves_padding_out_and_is_smooth_enough_at_zero() -> None:
    z = torch.tensor([[3.0, 0.0], [0.0, 4.0], [7.0, 7.0]], dtype=torch.float64)
    real = torch.tensor([True, True, False])
    assert float(norm(z, real)) == 5.0
    assert float(norm(z, None)) == pytest.approx((9 + 16 + 98) ** 0.5)
    slope = torch.func.grad(lambda z: norm(z, real))(z)
    torch.testing.assert_close(slope, torch.tensor([[0.6, 0.0], [0.0, 0.8], [0.0, 0.0]], dtype=torch.float64))
    assert torch.func.grad(lambda z: norm(z, None))(torch.zeros(3, 2)).tolist() == [[0.0, 0.0]] * 3


@pytest.mark.parametrize("conditions", ["previous", "current"])
def test_stacked_equal_looped_with_a_global_model(conditions: str) -> None:
    method = toy.method("gpfl", conditions=conditions, average_heads=True, pull=0.5)
    found, fast = toy.stacked(method, toy.model(), toy.toy())
    expected, slow = toy.looped(method, toy.model(), toy.toy())
    assert toy.distance(found, expected) < 1e-10
    for a, b in zip(fast, slow, strict=True):
        assert a.scores["global", "test"].weighted.tolist() == b.scores["global", "test"].weighted.tolist()


def test_an_unknown_source_of_conditions_is_refused() -> None:
    with pytest.raises(CoterieError, match="source of conditions"):
        GPFL(conditions="next")
