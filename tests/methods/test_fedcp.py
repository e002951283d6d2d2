"""FedCP against a loop with torch's modules, written from the paper."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.core import tree
from coterie.core.data import Transform
from coterie.core.errors import CoterieError
from coterie.core.model import make_model
from coterie.core.training import LocalTraining
from coterie.execution import Looped, Turn
from coterie.methods.fedcp import Down, FedCP, Server, context, kernel_distance, share
from coterie.methods.fedper import FedPer
from tests import plain, toy

SGD = LocalTraining(local_epochs=2, batch_size=8, lr=0.05, momentum=0.5, weight_decay=1e-3)
D = 8


def mmd(a: Tensor, b: Tensor) -> Tensor:
    """Over all pairs, one after the other."""

    def kernel(x: Tensor, y: Tensor) -> Tensor:
        return sum(torch.exp(-((x - y) ** 2).sum() / (2 * width)) for width in (10, 15, 20, 50))  # type: ignore[return-value]

    def mean(one: Tensor, other: Tensor) -> Tensor:
        return torch.stack([kernel(x, y) for x in one for y in other]).mean()

    return mean(a, a) + mean(b, b) - 2 * mean(a, b)


class Whole(nn.Module):
    """Encoder, policy and personal head."""

    def __init__(self) -> None:
        super().__init__()
        layers = list(toy.network().double().children())
        self.encoder, self.head = nn.Sequential(*layers[:-1]), layers[-1]
        self.policy = nn.Sequential(nn.Linear(D, 2 * D), nn.LayerNorm(2 * D), nn.ReLU()).double()

    def forward(self, x: Tensor, v: Tensor, shared: nn.Module) -> tuple[Tensor, Tensor]:
        h = self.encoder(x)
        r, s = self.policy(h * v).view(len(x), 2, D).softmax(1).unbind(1)
        return shared(r * h) + self.head(s * h), h


def policy_of(server: Server) -> dict[str, Tensor]:
    names = {"0.weight": "weight", "0.bias": "bias", "1.weight": "norm.weight", "1.bias": "norm.bias"}
    return {theirs: server.shared.policy[ours].clone() for theirs, ours in names.items()}


class Plain:
    def __init__(self, start: Server, align: float) -> None:
        self.align, self.whole = align, Whole()
        self.whole.policy.load_state_dict(policy_of(start))
        self.heads = [copy.deepcopy(self.whole.head) for _ in range(5)]

    def round(self, joined: list[int], turn: Turn) -> None:
        models = [plain.copy(self.client(i, turn)) for i in joined]
        mean = plain.mean(models, [plain.data().train.sizes[i] for i in joined])
        self.whole.load_state_dict(mean)

    def client(self, i: int, turn: Turn) -> Whole:
        net, received = copy.deepcopy(self.whole), self.whole.requires_grad_(False)
        net.requires_grad_(True)
        net.head = copy.deepcopy(self.heads[i]).requires_grad_(True)
        v = net.head.weight.detach().sum(0)
        v = v / v.norm()
        optimiser = plain.optimiser(net.parameters(), SGD, turn)
        for x, y in plain.batches(plain.data(), i, turn, SGD):
            optimiser.zero_grad()
            logits, h = net(x, v, received.head)
            loss = F.cross_entropy(logits, y)
            if self.align:
                loss = loss + self.align * mmd(h, received.encoder(x))
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        self.heads[i] = copy.deepcopy(net.head)
        return net


@pytest.mark.parametrize("align", [0.0, pytest.param(5.0, marks=pytest.mark.long)])
def test_rounds_equal_the_plain_implementation(align: float) -> None:
    """Clients that skip a round keep their head; the shared head is the mean of the personal ones."""
    method, data, model = FedCP(train=SGD, align=align), plain.data(), toy.model()
    rounds = plain.ROUNDS if not align else plain.ROUNDS[:2]
    start, _ = plain.federation(method, data, model, [])
    expected = Plain(start, align)
    for joined, turn in rounds:
        expected.round(joined, turn)
    server, clients = plain.federation(method, data, model, rounds)
    plain.assert_close(server.shared.encoder, plain.copy(expected.whole.encoder))
    plain.assert_close(server.head, plain.copy(expected.whole.head))
    plain.assert_close(policy_of(server), plain.copy(expected.whole.policy))
    for i, head in enumerate(expected.heads):
        plain.assert_close(clients.states[i].head, plain.copy(head))


def test_where_the_policy_gives_all_to_the_personal_head_it_is_fedper() -> None:
    """The shared head gets no features and has no bias here; the policy has no gradient."""
    network = toy.network()
    network[-1] = nn.Linear(D, toy.CLASSES, bias=False)  # type: ignore[operator]
    model = make_model(network, toy.SHAPE, toy.CLASSES, Transform((0.5,), (0.5,))).to("cpu", torch.float64)
    method, data = FedCP(train=replace(SGD, weight_decay=0.0), align=0.0), plain.data()
    server, clients = plain.federation(method, data, model, [])
    policy = server.shared.policy | {
        "norm.weight": torch.zeros(2 * D, dtype=torch.float64),
        "norm.bias": torch.tensor([0.0] * D + [800.0] * D, dtype=torch.float64),
    }
    closed = server._replace(shared=server.shared._replace(policy=policy))
    joined = torch.tensor([0, 1, 3])
    downs = tree.stack([method.server_send(closed, i) for i in joined])
    found = method.server_receive(closed, joined, clients.train(joined, downs, Turn(0)).ups)
    per, theirs = plain.federation(FedPer(train=method.train), data, model, [([0, 1, 3], Turn(0))])
    plain.assert_close(found.shared.encoder, per.shared.encoder)
    for i in (0, 1, 3):
        plain.assert_close(clients.states[i].head, theirs.states[i].personal.head)
    plain.assert_close(found.shared.policy, policy)


def test_the_policy_by_hand() -> None:
    """One feature: the norm of (a, -a) is (1, -1) for any a > 0, so r = 1 / (1 + e^-1) after ReLU."""
    policy = {
        "weight": torch.tensor([[1.0], [-1.0]], dtype=torch.float64),
        "bias": torch.zeros(2, dtype=torch.float64),
        "norm.weight": torch.ones(2, dtype=torch.float64),
        "norm.bias": torch.zeros(2, dtype=torch.float64),
    }
    r = share(policy, torch.tensor([[1000.0]], dtype=torch.float64))
    assert float(r) == pytest.approx(1 / (1 + math.exp(-1)))
    head = {"weight": torch.tensor([[1.0, 5.0], [2.0, -1.0]]), "bias": torch.zeros(2)}
    assert context(head, 2).tolist() == pytest.approx([0.6, 0.8])  # (3, 4) of length 1


def test_two_points_by_hand() -> None:
    """0 and 2 against each other: k(0) + k(0) - 2 k(4)."""
    a, b = torch.zeros(1, 1, dtype=torch.float64), torch.full((1, 1), 2.0, dtype=torch.float64)
    expected = 2 * sum(1 - math.exp(-4 / (2 * width)) for width in (10, 15, 20, 50))
    assert float(kernel_distance(a, b, None)) == pytest.approx(expected)
    padded = [torch.cat([t, t.new_full((2, 1), 77.0)]) for t in (a, b)]
    assert float(kernel_distance(*padded, torch.tensor([True, False, False]))) == pytest.approx(expected)
    assert float(kernel_distance(a, a, None)) == 0.0


def test_a_head_without_a_linear_layer_is_refused() -> None:
    with pytest.raises(CoterieError, match="needs a head whose first layer is linear"):
        context({"scale": torch.ones(3)}, 3)


def test_units_of_targets_count_once() -> None:
    """Heads that return zero predict the mean of the targets, not twice that mean."""
    data, model = toy.of_task("regression")
    method = FedCP(train=SGD)
    empty = tree.apply(torch.zeros_like, model.start.head)
    clients = Looped(method, model, data, 7, processes=1)
    server = method.server_init(model, clients.census)
    clients.join(method.server_welcome(server))
    down = method.server_send(server._replace(head=empty), torch.tensor(0))
    state = clients.states[0]._replace(head=empty)
    output = method.client_predict(model, state, down, data.test.x[:3])
    torch.testing.assert_close(output, torch.tensor([[5.0, -1.0]], dtype=torch.float64).expand(3, 2))


def test_pixels_divide_their_features_as_vectors_do() -> None:
    """The policy, the context and both heads of a U-Net give the same for a pixel as for its features alone."""
    data, model = toy.of_task("segmentation")
    server, clients = plain.federation(FedCP(train=SGD), data, model, plain.ROUNDS[:1])
    down, state, x = Down(*server), clients.states[0], data.test.x[:3]
    h = model.features(down.shared.encoder, x)  # (3, 8, 4, 12)
    own, shared = (head["weight"].flatten(1) for head in (state.head, down.head))  # (3, 8)
    v = own.sum(0) / own.sum(0).norm()
    pixel = h[1, :, 2, 5]
    r = share(down.shared.policy, pixel * v)
    expected = shared @ (r * pixel) + down.head["bias"] + own @ ((1 - r) * pixel) + state.head["bias"]
    found = FedCP().client_predict(model, state, down, x)[1, :, 2, 5]
    torch.testing.assert_close(found, expected)
