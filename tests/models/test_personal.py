"""A personal model is a real module: weights, state_dict, training, movement; equal to the method's prediction."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import coterie
from coterie.api.result import Result
from coterie.core.data import FederatedData
from coterie.methods import METHODS
from coterie.models.personal import Composite, OneNetwork
from tests import toy

PARTS = (  # whose model is more than one network
    "fedrod",
    "knn-per",
    "fedem",
    "gpfl",
    "fedreg",
    "feddbe",
    "fedcp",
    "pfedfda",
)
CLIENT = 3

every_method = pytest.mark.parametrize("name", METHODS)


@pytest.fixture(scope="module")
def runs() -> dict[tuple[str, bool], Result]:
    return {}


def trained(runs: dict[Any, Result], name: str, batch_norm: bool = False) -> Result:
    if (name, batch_norm) not in runs:
        network = toy.network_for(name, batch_norm)
        runs[name, batch_norm] = coterie.run(
            toy.method(name), toy.toy(), network, rounds=2, join_ratio=0.6, backend=toy.IN_TURN
        )
    return runs[name, batch_norm]


def data_of(result: Result) -> FederatedData:
    assert result.data is not None
    return result.data


def reference(result: Result, x: Tensor) -> Tensor:
    """What the method itself predicts."""
    with torch.no_grad():
        return result.method.client_predict(result.model, result.states[CLIENT], result.down(CLIENT), x)


@pytest.mark.long
@every_method
@pytest.mark.parametrize("batch_norm", [False, True], ids=["plain", "batchnorm"])
def test_it_holds_its_weights_and_predicts_as_the_method(name: str, batch_norm: bool, runs: dict[Any, Result]) -> None:
    result = trained(runs, name, batch_norm)
    model, (x, _) = result.personal_model(CLIENT), data_of(result).test.client(CLIENT)
    assert isinstance(model, Composite if name in PARTS else OneNetwork)
    assert not model.training
    held = (*model.parameters(), *model.buffers())  # the head of pFedFDA is not trained
    assert sum(t.numel() for t in held) >= sum(p.numel() for p in toy.network(batch_norm).parameters())
    assert model.state_dict()
    with torch.no_grad():
        torch.testing.assert_close(model(x), reference(result, x), rtol=0, atol=1e-6)


@every_method
def test_a_saved_state_dict_restores_it(name: str, runs: dict[Any, Result]) -> None:
    """Into the model of another client, of which nothing must be left."""
    result = trained(runs, name)
    x, _ = data_of(result).test.client(CLIENT)
    file = io.BytesIO()
    torch.save(result.personal_model(CLIENT).state_dict(), file)
    file.seek(0)
    other = copy.deepcopy(result.personal_model(CLIENT))
    with torch.no_grad():
        for tensor in (*other.parameters(), *(b for b in other.buffers() if b.is_floating_point())):
            tensor.fill_(0.5)
    with torch.no_grad():
        assert not torch.allclose(other(x), reference(result, x), atol=1e-3)
        other.load_state_dict(torch.load(file, weights_only=True))
        torch.testing.assert_close(other(x), reference(result, x), rtol=0, atol=1e-6)


# Without kNN-Per: its neighbors are looked up in a datastore of features as they were, and jump when the encoder moves.
@pytest.mark.parametrize("name", [name for name in METHODS if name != "knn-per"])
def test_it_can_be_trained(name: str, runs: dict[Any, Result]) -> None:
    """One step of SGD with plain torch lowers the loss, and touches no other copy."""
    result = trained(runs, name)
    x, y = data_of(result).train.client(CLIENT)
    before = reference(result, x)
    model = result.personal_model(CLIENT).train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        assert F.cross_entropy(model(x), y) < loss
    assert torch.equal(reference(result, x), before)


@every_method
def test_it_moves_to_another_type(name: str, runs: dict[Any, Result]) -> None:
    result = trained(runs, name)
    x, _ = data_of(result).test.client(CLIENT)
    model = result.personal_model(CLIENT).to(torch.float64)
    assert all(p.dtype == torch.float64 for p in model.parameters())
    with torch.no_grad():
        found = model(x)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found.float(), reference(result, x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["fedavg", "fedem", "fedrod"])
def test_training_mode_updates_batch_statistics(name: str, runs: dict[Any, Result]) -> None:
    result = trained(runs, name, batch_norm=True)
    x, _ = data_of(result).train.client(CLIENT)
    model = result.personal_model(CLIENT)

    def statistics() -> list[Tensor]:
        return [b.clone() for n, b in model.named_buffers() if n.endswith("running_mean")]

    first = statistics()
    assert first
    with torch.no_grad():
        model(x)
        assert all(map(torch.equal, first, statistics()))
        model.train()(x)
    assert not any(map(torch.equal, first, statistics()))


def test_it_knows_whose_it_is(runs: dict[Any, Result]) -> None:
    model = trained(runs, "fedavg").personal_model(CLIENT)
    assert (model.client, model.client_name, model.class_names) == (CLIENT, "3", ("0", "1", "2", "3"))
    assert (model.sample_shape, model.sample_dtype, model.columns) == (toy.SHAPE, torch.uint8, ())


class Tied(nn.Module):
    """The same layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.flat, self.below, self.act = nn.Flatten(), nn.Linear(144, 8), nn.ReLU()
        self.one = nn.Linear(8, 8)
        self.two = nn.Linear(8, 8)
        self.two.weight = self.one.weight
        self.head = nn.Linear(8, toy.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.two(self.act(self.one(self.act(self.below(self.flat(x)))))))
        return out


@pytest.mark.parametrize("name", ["fedavg", "fedrod"])
def test_tied_weights_stay_tied(name: str) -> None:
    result = coterie.run(toy.method(name), toy.toy(), Tied(), rounds=1, backend=toy.IN_TURN)
    x, _ = data_of(result).test.client(CLIENT)
    with torch.no_grad():
        torch.testing.assert_close(result.personal_model(CLIENT)(x), reference(result, x), rtol=0, atol=1e-6)


@pytest.mark.long
def test_every_model_has_its_own_weights(runs: dict[Any, Result]) -> None:
    """A hundred are made in seconds."""
    result = trained(runs, "fedem")
    models = [result.personal_model(CLIENT) for _ in range(100)]
    places = {p.data_ptr() for model in models for p in model.parameters()}
    assert len(places) == 100 * len(list(models[0].parameters()))


class Frozen(nn.Module):
    """A backbone that is not trained, with a layer that is, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Flatten(), nn.Linear(144, 16), nn.ReLU()).requires_grad_(False)
        self.below, self.fc = nn.Linear(16, 8), nn.Linear(8, toy.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.below(self.backbone(x)).relu())
        return out


@pytest.mark.parametrize("name", ["fedavg", "fedrod", "fedem"])
def test_frozen_parameters_are_a_part_of_it(name: str) -> None:
    network = Frozen()
    result = coterie.run(toy.method(name), toy.toy(), network, rounds=1, backend=toy.IN_TURN)
    x, _ = data_of(result).test.client(CLIENT)
    model = result.personal_model(CLIENT)
    still = [p for p in model.parameters() if not p.requires_grad]
    assert [p.shape for p in still] == [p.shape for p in network.backbone.parameters()]
    assert all(map(torch.equal, still, network.backbone.parameters()))
    assert any(p.requires_grad for p in model.parameters())
    with torch.no_grad():
        torch.testing.assert_close(model(x), reference(result, x), rtol=0, atol=1e-6)
        assert model.to(torch.float64)(x).dtype == torch.float64
        still[0].zero_()
        assert not torch.allclose(model(x).float(), reference(result, x), atol=1e-3)


def chain() -> nn.Module:
    """Its head is a layer and what comes after it."""
    return nn.Sequential(nn.Flatten(), nn.Linear(144, 8), nn.ReLU(), nn.Linear(8, toy.CLASSES), nn.Identity())


def normalized() -> nn.Module:
    return toy.network(batch_norm=True)


def two_parts() -> nn.Module:
    network = nn.Sequential()
    network.add_module("encoder", nn.Sequential(nn.Flatten(), nn.Linear(144, 8), nn.ReLU()))
    network.add_module("head", nn.Linear(8, toy.CLASSES))
    return network


@pytest.mark.parametrize("make", [toy.network, normalized, Tied, Frozen, chain, two_parts])
def test_its_weights_fit_into_the_users_network(make: Any) -> None:
    result = coterie.run(toy.method("fedper"), toy.toy(), make(), rounds=1, backend=toy.IN_TURN)
    own = make()
    own.load_state_dict(result.personal_model(CLIENT).network_state_dict())  # type: ignore[operator]
    x, _ = data_of(result).test.client(CLIENT)
    with torch.no_grad():
        torch.testing.assert_close(own.eval()((x / 255 - 0.5) / 0.5), reference(result, x), rtol=0, atol=1e-5)
