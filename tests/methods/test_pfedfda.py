"""pFedFDA against scikit-learn's discriminant analysis and plain loops over classes and samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch import Tensor, nn

from coterie.core import random, tree
from coterie.core.batch import Data
from coterie.core.data import FederatedData, Split
from coterie.core.model import make_model
from coterie.core.training import LocalTraining
from coterie.execution import Looped, Turn
from coterie.execution.requests import keys, send
from coterie.methods.pfedfda import Gaussians, classifier, fitted, halves, pFedFDA, scores
from tests import plain, toy

SGD = LocalTraining(local_epochs=2, batch_size=8, lr=0.01, momentum=0.5, weight_decay=1e-3)


def estimate(z: np.ndarray, y: np.ndarray, means: np.ndarray, ridge: float) -> tuple[np.ndarray, np.ndarray]:
    own, scatter = means.copy(), np.zeros((z.shape[1], z.shape[1]))
    for c in np.unique(y):
        own[c] = z[y == c].mean(0)
        for row in z[y == c]:
            scatter += np.outer(row - own[c], row - own[c])
    return own, scatter / max(len(y) - 1, 1) + ridge * np.eye(z.shape[1])


def logits(z: np.ndarray, means: np.ndarray, covariance: np.ndarray, priors: np.ndarray) -> np.ndarray:
    d = len(covariance)
    inverse = np.linalg.inv((1 - 1e-4) * covariance + 1e-4 * np.trace(covariance) / d * np.eye(d))
    columns = [z @ inverse @ mu - mu @ inverse @ mu / 2 + np.log(p) for mu, p in zip(means, priors, strict=True)]
    return np.stack(columns, 1)


class Plain:
    def __init__(self, data: FederatedData, method: pFedFDA, start: Gaussians) -> None:
        self.data, self.method = data, method
        self.net = plain.copy(toy.network().double())
        self.means, self.covariance = start.means.numpy(), start.covariance.numpy()
        self.shares: dict[int, float] = {}

    def round(self, joined: list[int], turn: Turn) -> None:
        sizes = [self.data.train.sizes[i] for i in joined]
        nets, means, covariances = zip(*(self.client(i, turn) for i in joined), strict=True)
        self.net = plain.mean(nets, sizes)
        self.means = sum(n / sum(sizes) * m for n, m in zip(sizes, means, strict=True))  # type: ignore[assignment]
        self.covariance = sum(n / sum(sizes) * c for n, c in zip(sizes, covariances, strict=True))  # type: ignore[assignment]

    def client(self, i: int, turn: Turn) -> tuple[dict[str, Tensor], np.ndarray, np.ndarray]:
        x, y = self.data.train.client(i)
        priors = np.bincount(y, minlength=toy.CLASSES) / len(y) + 1e-4
        priors /= priors.sum()
        inverse = torch.tensor(logits(np.eye(8), self.means, self.covariance, priors))
        bias = torch.tensor(logits(np.zeros((1, 8)), self.means, self.covariance, priors))
        net = toy.network().double()
        net.load_state_dict(self.net)
        optimiser = plain.optimiser(net[:-1].parameters(), SGD, turn)  # type: ignore[index]
        for bx, by in plain.batches(self.data, i, turn, SGD):
            optimiser.zero_grad()
            F.cross_entropy(net[:-1](bx) @ (inverse - bias) + bias, by).backward()  # type: ignore[index]
            optimiser.step()
        with torch.no_grad():
            z = net[:-1]((x.double() / 255 - 0.5) / 0.5).numpy()  # type: ignore[index]
        share = self.share(z, y.numpy(), priors, keys(plain.SEED, turn, torch.tensor(i)))
        self.shares[i] = share
        own, covariance = estimate(z, y.numpy(), self.means, self.method.ridge)
        mixed = share * own + (1 - share) * self.means, share * covariance + (1 - share) * self.covariance
        return plain.copy(net), *mixed

    def share(self, z: np.ndarray, y: np.ndarray, priors: np.ndarray, key: Tensor) -> float:
        if self.method.share is not None:
            return self.method.share
        sides: tuple[list[int], list[int]] = ([], [])
        seen: dict[int, int] = {}
        for j in random.shuffle(random.derive(key, random.SPLIT), len(y)).tolist():  # every second one of each class
            if (y == y[j]).sum() > 1:
                sides[seen.get(y[j], 0) % 2].append(j)
                seen[y[j]] = seen.get(y[j], 0) + 1
        losses = []
        options = np.linspace(0, 1, self.method.candidates)
        for share in options:
            total = 0.0
            for fit, test in (sides, sides[::-1]):
                own, covariance = estimate(z[fit], y[fit], self.means, self.method.ridge)
                u = logits(z[test], share * own + (1 - share) * self.means,
                           share * covariance + (1 - share) * self.covariance, priors)  # fmt: skip
                total += float(F.cross_entropy(torch.tensor(u), torch.tensor(y[test])))
            losses.append(total)
        return float(options[int(np.argmin(losses))])


@pytest.mark.long
@pytest.mark.parametrize("settings", [{}, {"share": 0.3}, {"candidates": 4, "ridge": 0.5}])
def test_three_rounds_equal_the_plain_implementation(settings: dict[str, float]) -> None:
    data, method = plain.data(), pFedFDA(train=SGD, **settings)  # type: ignore[arg-type]
    start, _ = plain.federation(method, data, toy.model(), [])
    expected = Plain(data, method, start.gaussians)
    for joined, turn in plain.ROUNDS:
        expected.round(joined, turn)
    server, clients = plain.federation(method, data, toy.model())
    plain.assert_close(server.encoder, {n: t for n, t in expected.net.items() if n in server.encoder})
    np.testing.assert_allclose(server.gaussians.means, expected.means, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(server.gaussians.covariance, expected.covariance, rtol=1e-9, atol=1e-11)
    assert {i: pytest.approx(float(clients.states[i].share)) for i in range(5)} == expected.shares


def test_the_classifier_is_that_of_discriminant_analysis() -> None:
    draw = np.random.default_rng(0)
    y = np.repeat(np.arange(3), 30)
    z = draw.normal(size=(90, 4)) + y[:, None]
    sklearn = LinearDiscriminantAnalysis(solver="lsqr").fit(z, y)
    nothing = Gaussians(torch.zeros(3, 4, dtype=torch.float64), torch.eye(4, dtype=torch.float64))
    found = fitted(torch.tensor(z), torch.tensor(y), torch.ones(90).bool(), nothing, 0.0)
    np.testing.assert_allclose(found.means, sklearn.means_, rtol=1e-10)
    np.testing.assert_allclose(found.covariance * 89 / 90, sklearn.covariance_, rtol=1e-10)
    biased = found._replace(covariance=found.covariance * 89 / 90)
    ours = scores(classifier(biased, torch.full((3,), 1 / 3, dtype=torch.float64)), torch.tensor(z))
    np.testing.assert_allclose(ours.softmax(1), sklearn.predict_proba(z), atol=1e-3)  # ours shrinks by 1e-4


def test_one_dimension_by_hand() -> None:
    """Means 0 and 2, variance 1 (which shrinkage keeps), equal priors: the boundary is at 1, the slope 2."""
    gaussians = Gaussians(torch.tensor([[0.0], [2.0]]), torch.tensor([[1.0]]))
    u = scores(classifier(gaussians, torch.tensor([0.5, 0.5])), torch.tensor([[1.0], [2.0]]))
    assert (u[:, 1] - u[:, 0]).tolist() == pytest.approx([0.0, 2.0])


def test_an_absent_class_keeps_the_shared_mean() -> None:
    shared = Gaussians(torch.full((3, 2), 7.0), torch.eye(2))
    z = torch.tensor([[1.0, 1.0], [3.0, 1.0], [100.0, 0.0]])
    found = fitted(z, torch.tensor([0, 0, 1]), torch.tensor([True, True, False]), shared, 0.0)  # the last is padding
    assert found.means.tolist() == [[2.0, 1.0], [7.0, 7.0], [7.0, 7.0]]
    assert found.covariance.tolist() == [[2.0, 0.0], [0.0, 0.0]]


def test_halves_have_equal_parts_of_each_class() -> None:
    y = torch.tensor([0] * 6 + [1] * 5 + [2])
    data = Data(y[:, None], y, torch.tensor(3), torch.ones(()), 4, toy.toy().transform)
    second = halves(data, data.counts[y] > 1)
    assert int(second[:6].sum()) == 3
    assert int(second[6:11].sum()) == 2


def test_the_first_means_can_be_reached_behind_a_relu() -> None:
    """Means below zero would push features into the flat part of the activation, where they collapse to a point."""
    data, method = plain.data(), pFedFDA(train=SGD)
    server, _ = plain.federation(method, data, toy.model(), [])
    means = server.gaussians.means
    assert 0 <= float(means.min()) < 0.2
    assert 0.8 < float(means.max()) < 1
    server, _ = plain.federation(method, data, toy.model())
    spread = toy.model().features(server.encoder, data.train.x).std(0)
    assert float(spread.max()) > 0.03  # 0.1, as before training; with standard normal means 0.005


def test_a_client_without_pairs_keeps_the_shared_gaussians() -> None:
    """Of its one sample nothing can be held out, so β is 0."""
    data, method = toy.toy(augmented=False), pFedFDA(train=SGD)
    server, clients = plain.federation(method, data, toy.model(), [([2], Turn(0))])
    before, _ = plain.federation(method, data, toy.model(), [])
    assert float(clients.states[2].share) == 0
    toy.assert_same(tree.flatten(server.gaussians), tree.flatten(before.gaussians))


def test_clients_that_have_not_trained_use_the_shared_gaussians() -> None:
    method, model, data = pFedFDA(train=SGD), toy.model(), plain.data()
    server, clients = plain.federation(method, data, model, plain.ROUNDS[:1])
    down, x = method.server_send(server, torch.tensor(2)), data.test.x[:3]
    state, z = clients.states[2], model.features(server.encoder, x)
    expected = scores(classifier(server.gaussians, state.priors), z)
    assert torch.equal(method.client_predict(model, state, down, x), expected)


def test_a_round_of_two_clients_by_hand() -> None:
    """Features are the samples: an encoder that multiplies by 1 and does not train. Shared: means 0 and 10, variance 1.

    Client 0: means 1 and 5, variance 4 / 3 + 1; half of it and of the shared: 0.5, 7.5 and 5 / 3. Client 1 has no
    second class: means 4 and the shared 10, variance 2 + 1, hence 2, 10 and 2. They have 4 and 2 samples.
    """
    x = torch.tensor([0.0, 2.0, 4.0, 6.0, 3.0, 5.0], dtype=torch.float64)[:, None]
    held = Split(x, torch.tensor([0, 0, 1, 1, 0, 0]), (4, 2))
    network = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 2)).double()
    with torch.no_grad():
        network[0].weight.fill_(1.0)
        network[0].bias.zero_()
    model = make_model(network, (1,), 2).to("cpu", torch.float64)
    method = pFedFDA(train=LocalTraining(local_epochs=0), share=0.5)
    clients = Looped(method, model, FederatedData("hand", 2, held, held), 0, processes=1)
    both = torch.tensor([0, 1])
    shared = Gaussians(torch.tensor([[0.0], [10.0]]).double(), torch.ones(1, 1).double())
    server = method.server_init(model, clients.census)._replace(gaussians=shared)
    clients.join(method.server_welcome(server))
    answers = clients.train(both, send(method, server, both), Turn(0))
    after = method.server_receive(server, both, answers.ups).gaussians
    for i, (means, variance) in enumerate((([0.5, 7.5], 5 / 3), ([2.0, 10.0], 2.0))):
        assert clients.states[i].gaussians.means.flatten().tolist() == pytest.approx(means)
        assert float(clients.states[i].gaussians.covariance) == pytest.approx(variance)
    assert after.means.flatten().tolist() == pytest.approx([1.0, 25 / 3])
    assert float(after.covariance) == pytest.approx(16 / 9)
    point = torch.tensor([[5.0]], dtype=torch.float64)  # 4.5 and 2.5 from the means of client 0, whose classes are even
    u = method.client_predict(model, clients.states[0], method.server_send(server, both[0]), point)[0]
    assert float(u[1] - u[0]) == pytest.approx((4.5**2 - 2.5**2) / (2 * 5 / 3))
