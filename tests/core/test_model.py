"""A network of a user: where its head is, what is frozen, and which layers are handled or refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from coterie.core.errors import CoterieError
from coterie.core.model import make_model
from coterie.core.rehearsal import rehearse
from coterie.core.task import Classification, Task
from coterie.core.tasks import NextToken, Regression, Segmentation
from coterie.core.tree import Live
from coterie.methods.fedcp import FedCP
from coterie.methods.feddbe import FedDBE
from coterie.methods.moon import MOON
from coterie.models.unet import unet
from tests import toy

BODY = (nn.Flatten(), nn.Linear(144, 8), nn.ReLU())


class Net(nn.Module):
    """Modules in the order they are registered in, and a forward that uses them in another."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        self.run = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def body() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(144, 8), nn.ReLU())


def head_first() -> nn.Module:
    return Net(lambda net, x: net.top(net.body(x)), top=nn.Linear(8, 4), body=body())


def timm_like() -> nn.Module:
    """A backbone, dropout, the classifier, and an Identity that is registered last."""
    return Net(
        lambda net, x: net.last(net.final(net.dropout(net.backbone(x)))),
        final=nn.Linear(8, 4), backbone=body(), dropout=nn.Dropout(0.5), last=nn.Identity(),
    )  # fmt: skip


def wrapped() -> nn.Module:
    """A whole classifier inside, with layers after it that do nothing."""
    return Net(
        lambda net, x: net.last(net.dropout(net.backbone(x))),
        backbone=head_first(), dropout=nn.Dropout(0.0), last=nn.Identity(),
    )  # fmt: skip


def misleading() -> nn.Module:
    """What is called fc is inside, not at the end."""
    return Net(lambda net, x: net.end(net.fc(net.body(x))), body=body(), fc=nn.Linear(8, 8), end=nn.Linear(8, 4))


FOUND: dict[str, tuple[nn.Module, str]] = {
    "head registered first": (head_first(), "top"),
    "timm-like": (timm_like(), "final"),
    "wrapped": (wrapped(), "backbone.top"),
    "misleading name": (misleading(), "end"),
    "classifier of two layers": (
        Net(
            lambda net, x: net.classifier(net.features(x)),
            classifier=nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4)),
            features=body(),
        ),
        "classifier",
    ),
    "fc among others": (Net(lambda net, x: net.fc(net.body(x)), fc=nn.Linear(8, 4), body=body()), "fc"),
    "sequential": (nn.Sequential(*BODY, nn.Linear(8, 4)), "3"),
    "sequential with an end": (nn.Sequential(*BODY, nn.Linear(8, 4), nn.Flatten(), nn.LogSoftmax(1)), "3"),
    "linear": (nn.Sequential(nn.Flatten(), nn.Linear(144, 4)), "1"),
    "in a chain": (nn.Sequential(nn.Sequential(*BODY), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))), "1"),
}


@pytest.mark.parametrize(("network", "name"), FOUND.values(), ids=list(FOUND))
def test_the_head_is_found(network: nn.Module, name: str) -> None:
    model = make_model(network, toy.SHAPE, 4)
    x = torch.randn(5, *toy.SHAPE)
    assert model.head_name == name
    assert model.start.head
    torch.testing.assert_close(model(model.start, x), network.eval()(x))
    owned = {id(p) for p in network.get_submodule(name).parameters()}
    held = sum(p.numel() for p in network.parameters() if id(p) in owned)
    assert sum(t.numel() for t in model.start.head.values()) == held


def test_a_named_head_is_taken_or_refused() -> None:
    assert make_model(misleading(), toy.SHAPE, 4, head="end").head_name == "end"
    with pytest.raises(CoterieError, match=r"no module 'nose' to be its head; modules .*: top, body, body\.1"):
        make_model(head_first(), toy.SHAPE, 4, head="nose")
    with pytest.raises(CoterieError, match=r"'fc' cannot be the head: it is not the last module that runs.*end"):
        make_model(misleading(), toy.SHAPE, 4, head="fc")
    with pytest.raises(CoterieError, match="'dropout' cannot be the head, it has no parameters"):
        make_model(timm_like(), toy.SHAPE, 4, head="dropout")


class Spread(nn.Module):
    """No module runs last: two of them are summed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(144, 4), nn.Linear(144, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.a(x.flatten(1)).tanh() + self.b(x.flatten(1))
        return out


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.fc = nn.Linear(144, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.fc.weight = self.second.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.second(self.first(x.flatten(1))))
        return out


class Stateful(nn.Module):
    """Remembers the last batch, outside of its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.fc, self.memory = body(), nn.Linear(8, 4), torch.zeros(8)

    def forward(self, x: Tensor) -> Tensor:
        z = self.body(x) + self.memory
        self.memory = z.detach().mean(0)
        out: Tensor = self.fc(z)
        return out


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.fc = body(), nn.Linear(8, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        out: Tensor = self.fc(self.body(x))
        return out


class Forgetful(nn.Module):
    """Its statistic is replaced, not written to."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.fc = body(), nn.Linear(8, 4)
        self.register_buffer("running_mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        z = self.body(x)
        if self.training:
            self.running_mean = 0.9 * self.running_mean + 0.1 * z.detach().mean(0)
        out: Tensor = self.fc(z - self.running_mean if not self.training else z)
        return out


def chain(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(144, 8), nn.Linear(8, 4))


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "softmax": (lambda: nn.Sequential(*BODY, nn.Linear(8, 4), nn.Softmax(1)), "ends in a softmax"),
    "tied": (Tied, "'weight' and the encoder's 'second.weight' are one parameter"),
    "state": (Stateful, "keeps state between calls"),
    "counter": (Counting, "writes to its buffer 'seen'"),
    "statistic replaced": (Forgetful, "replaces its buffer 'running_mean'"),
    "spectral norm": (
        lambda: nn.Sequential(nn.Flatten(), parametrizations.spectral_norm(nn.Linear(144, 8)), nn.Linear(8, 4)),
        r"writes to its buffer '1\.parametrizations\.weight\.0\._[uv]'",
    ),
    "old weight norm": (lambda: nn.Sequential(*BODY, torch.nn.utils.weight_norm(nn.Linear(8, 4))), "cannot be copied"),
    "sync": (lambda: chain(nn.SyncBatchNorm(1)), r"layer '0' \(SyncBatchNorm\) .* use BatchNorm"),
    "cumulative": (lambda: chain(nn.BatchNorm2d(1, momentum=None)), r"layer '0' \(BatchNorm2d\) has momentum=None"),
    "lazy": (lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(4)), r"layer '1' \(LazyLinear\) has no weights yet"),
    "dropout in evaluation": (
        lambda: Net(lambda net, x: net.fc(F.dropout(net.body(x), 0.5)), body=body(), fc=nn.Linear(8, 4)),
        "draws random numbers in evaluation too",
    ),
    "classes": (lambda: nn.Sequential(*BODY, nn.Linear(8, 3)), r"outputs of shape \(3,\), .* each of 4 classes"),
    "shape": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(25, 4)),
        "cannot take float32 samples of shape 1 x 12",
    ),
    "all frozen": (lambda: nn.Sequential(*BODY, nn.Linear(8, 4)).requires_grad_(False), "all its parameters have"),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(("network", "message"), REFUSED.values(), ids=list(REFUSED))
def test_what_is_refused(network: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(CoterieError, match=message):
        make_model(network(), toy.SHAPE, 4)


class Transformer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(12, 2, 16, dropout, batch_first=True)
        self.classifier, self.layers = nn.Linear(12, 4), nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.classifier(self.layers(x[:, 0]).mean(1))
        return out


DRAWS: dict[str, tuple[nn.Module, str]] = {
    "dropout": (timm_like(), r"dropout \(Dropout\)"),
    "dropout of 0": (wrapped(), "^$"),
    "alpha dropout": (chain(nn.AlphaDropout(0.5)), r"0 \(AlphaDropout\)"),
    "RReLU": (chain(nn.RReLU()), r"0 \(RReLU\)"),
    "attention": (Transformer(0.1), r"layers\.layers\.0\.self_attn \(MultiheadAttention\)"),
    "attention without": (Transformer(0.0), "^$"),
    "functional": (
        Net(lambda net, x: net.fc(F.dropout(net.body(x), 0.5, net.training)), body=body(), fc=nn.Linear(8, 4)),
        "its forward",
    ),
    "instance norm": (chain(nn.InstanceNorm2d(1, track_running_stats=True)), "^$"),
    "weight norm": (nn.Sequential(*BODY, parametrizations.weight_norm(nn.Linear(8, 4))), "^$"),
}


@pytest.mark.parametrize(("network", "layers"), DRAWS.values(), ids=list(DRAWS))
def test_what_draws_random_numbers_is_known(network: nn.Module, layers: str) -> None:
    assert re.search(layers, make_model(network, toy.SHAPE, 4).draws)


def test_draws_that_change_nothing_by_chance_are_known() -> None:
    """Two masks of a small share of few features are often equal."""
    network = Net(lambda net, x: net.fc(F.dropout(net.body(x), 1e-4, net.training)), body=body(), fc=nn.Linear(8, 4))
    assert make_model(network, toy.SHAPE, 4).draws == "its forward"


def frozen_backbone() -> nn.Module:
    network = toy.network(batch_norm=True)
    for layer in (network[0], network[1]):  # type: ignore[index]
        layer.requires_grad_(False)
    return network


def test_what_is_frozen_is_no_weight() -> None:
    network = frozen_backbone()
    model = make_model(network, toy.SHAPE, 4)
    frozen = {"encoder.0.weight", "encoder.0.bias", "encoder.1.weight", "encoder.1.bias"}
    assert set(model.frozen) == frozen | {"encoder.1.running_mean", "encoder.1.running_var"}
    assert set(model.start.encoder) == {"5.weight", "5.bias"}
    again = make_model(toy.network(batch_norm=True, seed=1), toy.SHAPE, 4)
    assert not again.frozen


def test_a_frozen_normalization_layer_acts_as_in_evaluation() -> None:
    model = make_model(frozen_backbone(), toy.SHAPE, 4)
    x, before = torch.randn(6, *toy.SHAPE), {n: t.clone() for n, t in model.frozen.items()}
    torch.testing.assert_close(model.features(Live(model.start.encoder), x), model.features(model.start.encoder, x))
    toy.assert_same(model.frozen, before)


def test_one_without_weights_of_its_own_keeps_its_statistics_moving() -> None:
    network = nn.Sequential(nn.BatchNorm2d(1, affine=False), *BODY, nn.Linear(8, 4))
    model = make_model(network, toy.SHAPE, 4)
    live = Live({n: t.clone() for n, t in model.start.encoder.items()})
    model.features(live, torch.randn(6, *toy.SHAPE) + 3)
    assert float(live["0.running_mean"]) > 0.1


def test_a_model_begins_from_what_it_is_given() -> None:
    model, other = (make_model(net, toy.SHAPE, 4) for net in (frozen_backbone(), frozen_backbone()))
    given = {n: t + 1 for n, t in model.initial.items()}
    made = other.begin_from(given)
    toy.assert_same(made.initial, given)
    assert set(made.frozen) == set(model.frozen)
    toy.assert_same(other.initial, model.initial)  # what it was made from is as it was


def features_of(
    network: nn.Module, task: Task, shape: tuple[int, ...], label: tuple[int, ...] = (), head: str | None = None
) -> tuple[int, int]:
    """The axis of the features of a sample, and their number."""
    model = make_model(network, shape, task, label=label, head=head)
    return model.feature_axis, model.dim


def test_features_lie_along_the_axis_that_the_head_reads() -> None:
    """Of pixels along the second, of tokens along the last, whatever the task."""
    assert features_of(unet((1, 8, 16), 3, width=8), Segmentation(3), (1, 8, 16), (8, 16)) == (1, 8)
    tokens = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 5))
    assert features_of(tokens, NextToken(5), (6, 4), (6,)) == (2, 7)
    vector = nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
    assert features_of(vector, Regression(2), (2, 3), (2,)) == (1, 4)


def test_a_head_that_does_not_tell_the_axis_is_refused_where_it_matters() -> None:
    """It flattens: its layer reads all features of a sample at once."""
    network = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Sequential(nn.Flatten(), nn.Linear(4 * 6, 2)))
    model = make_model(network, (1, 2, 3), Regression(2), label=(2,), head="1")
    unknown = "the head '1' does not tell along which axis of its input they lie"
    for method, reason in (FedDBE(), unknown), (MOON(), unknown), (FedCP(), "FedCP needs a head whose first layer is"):
        with pytest.raises(CoterieError, match=reason):
            rehearse(method, model, torch.rand(6, 1, 2, 3), torch.rand(6, 2))


def test_a_loss_without_a_gradient_is_refused() -> None:
    class Constant(Regression):
        name = "constant"

        def loss(self, output: Tensor, y: Tensor) -> Tensor:
            return super().loss(output.detach(), y)

    with pytest.raises(CoterieError, match=r"task constant: the loss has no gradient.*without detach\(\)"):
        make_model(nn.Sequential(*BODY, nn.Linear(8, 1)), (1, 12, 12), Constant(1), label=(1,))


@pytest.mark.parametrize(
    ("task", "says"),
    [
        (lambda: Classification(2, class_weights=[0, 0]), "not all 0"),
        (lambda: Regression(1, [0.0], [-2.0]), "std at least 0"),
        (lambda: Regression(1, [float("nan")]), "finite"),
    ],
)
def test_tasks_that_train_nothing_are_refused(task: Callable[[], Task], says: str) -> None:
    with pytest.raises(CoterieError, match=says):
        task()


def test_parameters_of_different_types_are_refused() -> None:
    network = Net(lambda net, x: net.head(net.body(x).double()), body=body(), head=nn.Linear(8, 4).double())
    with pytest.raises(CoterieError, match=r"'body\.1\.bias' is float32, 'head\.bias' is float64"):
        make_model(network, (1, 12, 12), 4)
    network = Net(lambda net, x: net.head(net.body(x).float()), body=body().bfloat16(), head=nn.Linear(8, 4))
    network.body.requires_grad_(False)
    network.run = lambda net, x: net.head(net.body(x.bfloat16()).float())
    assert make_model(network, (1, 12, 12), 4).dim == 8
