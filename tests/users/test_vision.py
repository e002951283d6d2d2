"""Somebody with images and a network of their own: a pretrained backbone, a classifier on top, whatever its layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import coterie

LOOPED = coterie.Execution(backend="looped", processes=1)


@pytest.fixture(scope="module")
def clients() -> Any:
    return coterie.load_clients("fashion-mnist-small", num_clients=4, local_size=30, test_size=10)


class Backbone(nn.Module):
    """As from a model zoo: convolutions with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 5, stride=2), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(self.norm(self.conv(x)).relu(), 3).flatten(1)


class Classifier(nn.Module):
    """The head is registered before the body, and the last modules have no parameters."""

    def __init__(self, pretrained: nn.Module) -> None:
        super().__init__()
        self.fc = nn.Linear(12, 10)
        self.neck = nn.Linear(36, 12)
        self.backbone = pretrained
        self.drop = nn.Dropout(0.0)
        self.out = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.fc(self.drop(self.neck(self.backbone(x)).relu())))  # type: ignore[no-any-return]


def pretrained(frozen: bool = True) -> Classifier:
    torch.manual_seed(0)
    network = Classifier(Backbone())
    network.backbone.requires_grad_(not frozen)
    return network


@pytest.mark.parametrize("where", ["looped", "stacked"])
@pytest.mark.parametrize("method", ["fedavg", "fedper", "fedpac"])
def test_a_frozen_backbone_stays_and_is_not_sent(method: str, where: str, clients: Any) -> None:
    network = pretrained()
    result = coterie.run(method, clients, network, rounds=1, backend=where, local_epochs=1)
    personal = [result.personal_model(i).state_dict() for i in range(4)]
    for name, before in network.backbone.state_dict().items():
        if name == "norm.num_batches_tracked":
            continue
        held = [next(t for n, t in own.items() if n.endswith(f"backbone.{name}")) for own in personal]
        assert all(torch.equal(t, before) for t in held), name
    neck, head = 36 * 12 + 12, 12 * 10 + 10
    numbers = {"fedavg": neck + head + 1, "fedper": neck + 1, "fedpac": neck + head + 2 * 10 * 12 + 10 + 1}[method]
    assert result.history[0].bytes_up == 4 * 4 * numbers


def test_fedper_personalizes_the_classifier(clients: Any, tmp_path: Path) -> None:
    """Not Dropout or Identity, which are registered last."""
    out = tmp_path / "run"
    result = coterie.run("fedper", clients, pretrained(), rounds=1, backend=LOOPED, out=out, local_epochs=1)
    weights = [dict(result.personal_model(i).named_parameters()) for i in range(2)]
    heads, necks = ([w[n] for w in weights for n in w if n.endswith(end)] for end in ("head.weight", "neck.weight"))
    assert heads[0].shape == (10, 12)
    assert not torch.equal(*heads)
    assert torch.equal(*necks)
    told = json.loads((out / "config.json").read_text())["model"]
    assert told["head_name"] == "fc"
    assert (told["encoder_parameters"], told["head_parameters"]) == (36 * 12 + 12, 12 * 10 + 10)
    assert told["frozen_parameters"] == 4 * 25 + 4 + 4 * 4  # convolution, and BatchNorm with its statistics
    assert set(load_file(out / "models" / "frozen.safetensors")) == {
        f"encoder.backbone.{name}"
        for name in ("conv.weight", "conv.bias", "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var")
    }
    images = clients.test.x
    again = coterie.load_run(out, pretrained()).personal_model(1)
    assert torch.equal(again(images), result.personal_model(1)(images))


def test_a_whole_network_that_is_frozen_is_refused(clients: Any) -> None:
    with pytest.raises(coterie.CoterieError, match="all its parameters have requires_grad=False"):
        coterie.run("fedavg", clients, pretrained().requires_grad_(False), rounds=1)


def test_a_head_that_is_none_is_refused(clients: Any) -> None:
    with pytest.raises(coterie.CoterieError, match=r"'out' cannot be the head, it has no parameters; .*fc, neck"):
        coterie.run("fedper", clients, pretrained(), rounds=1, head="out")
    with pytest.raises(coterie.CoterieError, match="'neck' cannot be the head: it is not the last module that runs"):
        coterie.run("fedper", clients, pretrained(), rounds=1, head="neck")


class Adapted(nn.Module):
    """What is added behind the classifier does nothing at the start: a scale of 1, an adapter of zeros."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.encoder, self.head = nn.Sequential(nn.Flatten(), nn.Linear(784, 6), nn.ReLU()), nn.Linear(6, 10)
        self.scale = nn.Parameter(torch.ones(1)) if kind == "scale" else None
        self.adapter = nn.Linear(6, 10, bias=False) if kind == "adapter" else None
        if self.adapter is not None:
            nn.init.zeros_(self.adapter.weight)

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x)
        out: Tensor = self.head(z) if self.adapter is None else self.head(z) + self.adapter(z)
        return out if self.scale is None else out * self.scale


@pytest.mark.parametrize("kind", ["scale", "adapter"])
def test_what_has_no_effect_at_the_start_is_not_lost(kind: str, clients: Any) -> None:
    with pytest.raises(coterie.CoterieError, match="no head was found"):
        coterie.run("fedper", clients, Adapted(kind), rounds=1)
    with pytest.raises(coterie.CoterieError, match="'head' cannot be the head"):
        coterie.run("fedper", clients, Adapted(kind), rounds=1, head="head")


def test_the_last_layer_of_a_head_that_pools(clients: Any) -> None:
    """As in timm: the module `head` takes feature maps, and its last layer a vector."""
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.0), nn.Linear(4, 10))
    network = nn.Sequential()
    network.add_module("stem", nn.Conv2d(1, 4, 5))
    network.add_module("head", head)
    result = coterie.run("fedper", clients, network, rounds=1, backend=LOOPED, local_epochs=1)
    assert result.model.head_name == "head.3"
    first, second = (result.personal_model(i).network_state_dict() for i in range(2))
    assert [n for n in first if not torch.equal(first[n], second[n])] == ["head.3.weight", "head.3.bias"]


def test_a_model_of_images_refuses_what_it_would_scale_otherwise(clients: Any) -> None:
    model = coterie.run("fedavg", clients, "linear", rounds=1, backend=LOOPED).personal_model(0)
    images = clients.test.client(0)[0]
    torch.testing.assert_close(model(images / 255), model(images), rtol=1e-4, atol=1e-5)
    for wrong in (images.float(), images.long(), images[:, 0], images.double()):
        with pytest.raises(coterie.CoterieError, match=r"takes uint8 samples of shape \(batch, 1, 28, 28\)"):
            model(wrong)


class Rows(nn.Module):
    """An LSTM over the rows of an image, which torch cannot compute for several clients at once."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.fc = nn.LSTM(28, 8, batch_first=True), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.rows(x[:, 0])[0][:, -1])  # type: ignore[no-any-return]


def test_a_recurrent_network_runs_and_a_refusal_leaves_no_folder(tmp_path: Path) -> None:
    many = coterie.load_clients("fashion-mnist-small", num_clients=8, local_size=12, test_size=4)
    out = tmp_path / "run"
    with pytest.raises(coterie.CoterieError, match="cannot be stacked"):
        coterie.run("fedavg", many, Rows(), rounds=1, backend="stacked", out=out, local_epochs=1)
    result = coterie.run("fedavg", many, Rows(), rounds=1, out=out, local_epochs=1)
    assert (out / "result.json").exists()
    assert result.history[0].scores
