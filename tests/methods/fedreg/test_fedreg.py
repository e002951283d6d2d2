"""FedReG against a loop with modules and two optimisers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.core import random
from coterie.core.batch import Data
from coterie.core.data import FederatedData
from coterie.core.errors import CoterieError
from coterie.core.training import LocalTraining
from coterie.execution import Looped, Turn
from coterie.execution.requests import keys
from coterie.methods.fedreg.method import Down, FedReG, Server, State, Up
from coterie.methods.fedreg.rebalance import rebalance, rebalanced_data
from tests import plain, toy

SGD = LocalTraining(local_epochs=2, batch_size=8, lr=0.05, momentum=0.5, weight_decay=1e-2)


class Plain:
    """Algorithms 1 and 2. The rebalanced sets are data, so they are taken from where they are made."""

    def __init__(self, data: FederatedData, method: FedReG) -> None:
        self.data, self.method, self.sgd = data, method, method.train
        net: Any = toy.network().double()
        self.weights = plain.copy(net)
        self.heads = [plain.copy(net[-1]) for _ in data.train.sizes]
        sizes = data.train.sizes
        self.t = max(sizes) if method.threshold == "max" else sum(sizes) // len(sizes)
        self.kept: dict[Any, Any] = {}  # momentum of client and pass

    def round(self, joined: list[int], turn: Turn) -> None:
        ups = [self.client(i, turn) for i in joined]
        models, effective = [m for m, _ in ups], [e for _, e in ups]
        sizes = [float(self.data.train.sizes[i]) for i in joined]
        base = plain.mean(models, sizes)
        head = plain.mean(models, effective if self.method.head_by == "effective" else sizes)
        self.weights = {n: head[n] if n.startswith("6.") else t for n, t in base.items()}

    def sets(self, i: int, turn: Turn) -> tuple[Tensor, Tensor, float]:
        """d_r, and D_e counted as eq. (6) says."""
        x, y = self.data.train.client(i)
        if not self.method.rebalance:
            return x, y, float(len(y))
        joining = keys(plain.SEED, Turn(-1), torch.tensor(i))
        data = Data(x, y, joining, torch.tensor(1.0, dtype=torch.float64), toy.CLASSES, self.data.transform)
        made = rebalanced_data(data, rebalance(data, self.t), self.method.augmentation, self.method.flip)
        present = [k for k in range(toy.CLASSES) if (y == k).any()]
        t_c = max(self.t // len(present), 1)
        return made.x[made.real], made.y[made.real], float(sum(min(int((y == k).sum()), t_c) for k in present))

    def client(self, i: int, turn: Turn) -> tuple[dict[str, Tensor], float]:
        net: Any = toy.network().double()
        net.load_state_dict(self.weights)
        own = nn.Linear(8, toy.CLASSES).double()
        own.load_state_dict(self.heads[i])
        base, shared = net[:-1], net[-1]
        x, y = self.data.train.client(i)
        more_x, more_y, effective = self.sets(i, turn)
        moved = [*base.parameters(), *(own if self.method.two_heads else shared).parameters()]
        first = plain.optimiser(moved, self.sgd, turn)
        second = plain.optimiser(net.parameters(), self.sgd, turn)
        for number, optimiser in enumerate((first, second)):
            if self.sgd.keep_momentum and (i, number) in self.kept:
                for p, buffer in zip(optimiser.param_groups[0]["params"], self.kept[i, number], strict=True):
                    optimiser.state[p]["momentum_buffer"] = buffer
        key = keys(plain.SEED, turn, torch.tensor(i))

        def one_pass(number: int, epoch: int) -> None:
            pixels, labels = ((x, y), (more_x, more_y))[number]
            inputs = (pixels.double() / 255 - 0.5) / 0.5
            own_key = random.derive(random.derive(key, random.REBALANCE) if number else key, epoch)
            shuffled = random.shuffle(random.derive(own_key, random.SHUFFLE, 0), len(labels))
            for index in torch.split(shuffled, self.sgd.batch_size):
                if self.sgd.drop_last and len(index) < self.sgd.batch_size:
                    continue
                z = base(inputs[index])
                output = shared(z)
                if number == 0 and self.method.two_heads:
                    output = output + own(z)
                optimiser = (first, second)[number]
                net.zero_grad()
                own.zero_grad()
                F.cross_entropy(output, labels[index]).backward()
                optimiser.step()

        kinds = (0, 1) if self.method.original_pass else (1,)
        epochs = range(self.sgd.local_epochs)
        inner = [(n, e) for e in epochs for n in kinds]
        for number, epoch in inner if self.method.order == "interleaved" else [(n, e) for n in kinds for e in epochs]:
            one_pass(number, epoch)
        for number, optimiser in enumerate((first, second)):
            buffers = [optimiser.state[p].get("momentum_buffer") for p in optimiser.param_groups[0]["params"]]
            self.kept[i, number] = [b if b is None else b.clone() for b in buffers]
        self.heads[i] = plain.copy(own)
        return plain.copy(net), effective


VARIANTS: list[dict[str, Any]] = [
    {},
    {"order": "block", "augmentation": "auto"},
    {"threshold": "max", "augmentation": "none"},
    {"head_by": "samples"},
    {"two_heads": False},
    {"rebalance": False},
    {"original_pass": False, "flip": False},
]
NAMES = ["usual", "block", "max", "a", "b", "c", "d"]


@pytest.mark.parametrize("changes", VARIANTS, ids=NAMES)
def test_three_rounds_equal_the_plain_implementation(changes: dict[str, Any]) -> None:
    compare(FedReG(train=SGD, **changes))


@pytest.mark.parametrize(
    "training", [{"keep_momentum": True}, {"keep_momentum": True, "drop_last": True}], ids=["keep", "drop"]
)
def test_momentum_of_each_pass_is_its_own(training: dict[str, Any]) -> None:
    compare(FedReG(train=SGD.but(**training)))


def compare(method: FedReG) -> None:
    data = plain.data()
    expected = Plain(data, method)
    for joined, turn in plain.ROUNDS:
        expected.round(joined, turn)
    server, clients = plain.federation(method, data, toy.model())
    weights = {**server.encoder, **{f"6.{n}": t for n, t in server.head.items()}}
    plain.assert_close(weights, expected.weights)
    for i, head in enumerate(expected.heads):
        if method.personal:
            plain.assert_close(clients.states[i].head, head)
        else:
            assert clients.states[i].head == {}


@pytest.mark.parametrize("changes", VARIANTS[1:], ids=NAMES[1:])
def test_variants_stacked_equal_looped(changes: dict[str, Any]) -> None:
    method = toy.method("fedreg", keep_momentum=True, **changes)
    expected, _ = toy.looped(method, toy.model(), toy.toy())
    found, _ = toy.stacked(method, toy.model(), toy.toy())
    assert toy.distance(expected, found) < 1e-10


def test_without_first_pass_and_rebalancing_it_is_fedavg() -> None:
    """Whole-batch steps, so that the order of samples does not matter."""
    model, data, settings = toy.model(), toy.toy(augmented=False), {"batch_size": 40, "momentum": 0.9}
    found, _ = toy.looped(toy.method("fedreg", original_pass=False, rebalance=False, **settings), model, data)
    averaged, _ = toy.looped(toy.method("fedavg", **settings), model, data)
    for part in ("encoder", "head"):
        for name in getattr(model.start, part):
            here, there = found[f"server.{part}.{name}"], averaged[f"server.weights.{part}.{name}"]
            torch.testing.assert_close(here, there, rtol=0, atol=1e-12)


def test_one_head_on_the_data_twice_is_fedavg_with_twice_the_epochs() -> None:
    model, data, settings = toy.model(), toy.toy(augmented=False), {"batch_size": 40, "momentum": 0.0}
    found, _ = toy.looped(toy.method("fedreg", two_heads=False, rebalance=False, **settings), model, data)
    averaged, _ = toy.looped(toy.method("fedavg", local_epochs=4, **settings), model, data)
    for name in model.start.encoder:
        here, there = found[f"server.encoder.{name}"], averaged[f"server.weights.encoder.{name}"]
        torch.testing.assert_close(here, there, rtol=0, atol=1e-12)


def answer(**changes: Any) -> tuple[State, Up]:
    """What client 1 makes of one round."""
    method, model, data = FedReG(train=SGD.but(**changes)), toy.model(), plain.data()
    clients = Looped(method, model, data, plain.SEED, processes=1)
    server = method.server_init(model, clients.census)
    clients.join(method.server_welcome(server))
    ids = torch.tensor([1])
    down = Down(*(type(part)({n: t[None] for n, t in part.items()}) for part in model.start))
    got = clients.train(ids, down, Turn(0))
    return clients.states[1], got.ups


def test_weight_decay_does_not_reach_the_frozen_head() -> None:
    """Each head is shrunk in its own pass only."""
    state, up = answer(local_epochs=1, lr=1e-9, weight_decay=1e8, batch_size=20, momentum=0.0)
    start = toy.model().start.head
    for name, value in start.items():  # one step each: 1 - lr * decay = 0.9
        torch.testing.assert_close(state.head[name], 0.9 * value, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(up.head[name][0], 0.9 * value, rtol=1e-5, atol=1e-7)


def test_both_parts_have_weights_of_their_own() -> None:
    one = torch.ones(1, dtype=torch.float64)
    ups = Up(
        {"w": torch.stack([one, 5 * one])},
        {"v": torch.stack([one, 5 * one])},
        torch.tensor([1.0, 3.0]),
        torch.tensor([2.0, 2.0]),
    )
    server, ids = Server({"w": one}, {"v": one}, torch.tensor(3)), torch.tensor([0, 1])
    after = FedReG().server_receive(server, ids, ups)
    assert after.encoder["w"].item() == pytest.approx(4.0)  # by D_o
    assert after.head["v"].item() == pytest.approx(3.0)  # by D_e
    assert FedReG(head_by="samples").server_receive(server, ids, ups).head["v"].item() == pytest.approx(4.0)


def test_both_heads_speak_for_a_client_and_one_for_all() -> None:
    model, x = toy.model(), toy.toy().test.x[:5]
    encoder, head = model.start
    own = {n: torch.randn(t.shape, dtype=t.dtype, generator=torch.Generator().manual_seed(1)) for n, t in head.items()}
    state, down = State(own, (), {}, {}), Down(encoder, head)
    z = toy.network().double()[:-1]((x.double() / 255 - 0.5) / 0.5).detach()  # type: ignore[index]
    shared = z @ head["weight"].T + head["bias"]
    both = FedReG().client_predict(model, state, down, x)
    torch.testing.assert_close(both, shared + z @ own["weight"].T + own["bias"])
    torch.testing.assert_close(FedReG().server_predict(model, Server(encoder, head, torch.tensor(1)), x), shared)
    for changes in ({"two_heads": False}, {"original_pass": False}):
        alone = FedReG(**changes).client_predict(model, State({}, (), {}, {}), down, x)  # type: ignore[arg-type]
        torch.testing.assert_close(alone, shared)


def test_wrong_words_are_refused() -> None:
    for field in ("threshold", "augmentation", "order", "head_by"):
        with pytest.raises(CoterieError, match="unknown"):
            FedReG(**{field: "none of these"})  # type: ignore[arg-type]
