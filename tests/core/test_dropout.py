"""Dropout from the hash: its distribution, what it depends on, and the layers in which it replaces torch's."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

from coterie.core import dropout, random
from coterie.core.batch import Batch
from coterie.core.layers import draws
from coterie.core.model import make_model
from tests import toy
from tests.core.test_model import Net, Transformer

KEY = random.seed_key(5)


def drawn(layer: Callable[[Tensor], Tensor], x: Tensor, key: Tensor = KEY, first: int = 0) -> Tensor:
    with dropout.known(key, torch.arange(first, first + len(x))), dropout.hashed():
        return layer(x)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.73])
def test_mean_and_variance_are_those_of_bernoulli(p: float) -> None:
    """Entries are 1 / (1 - p) with probability 1 - p: mean 1, variance p / (1 - p)."""
    y = drawn(lambda x: F.dropout(x, p), torch.ones(400, 999, dtype=torch.float64))
    n, variance = y.numel(), p / (1 - p)
    assert abs(float(y.mean()) - 1) < 4 * math.sqrt(variance / n)
    assert abs(float(y.var()) - variance) < 0.01
    assert set(y.unique().tolist()) == {0.0, float(y.max())}
    per_sample, per_entry = y.mean(1), y.mean(0)  # independent along both axes: the variance of a mean of k is 1/k
    assert float(per_sample.var()) * 999 == pytest.approx(variance, rel=0.3)
    assert float(per_entry.var()) * 400 == pytest.approx(variance, rel=0.3)


def test_a_mask_is_exact_in_expectation_for_any_p() -> None:
    """p is drawn in steps of 2^-16; the scale is that of the p that is drawn."""
    _, p = dropout.Masks(KEY, torch.arange(2)).keep((2, 4), 0.1)
    assert p == round(0.1 * 2**16) / 2**16
    assert not drawn(lambda x: F.dropout(x, 1.0), torch.ones(2, 3)).any()
    assert drawn(lambda x: F.dropout(x, 0.0), torch.ones(2, 3)).all()
    assert drawn(lambda x: F.dropout(x, 0.999999), torch.ones(2, 3)).isfinite().all()


def test_alpha_dropout_keeps_mean_and_variance() -> None:
    x = torch.randn(200, 2000, generator=torch.Generator().manual_seed(0))
    for layer in (nn.AlphaDropout(0.2), lambda x: F.feature_alpha_dropout(x[:, :, None], 0.2, training=True)):
        y = drawn(layer, x)
        assert abs(float(y.mean())) < 0.01
        assert float(y.var()) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.Dropout1d(0.5), (3, 40, 7)), (nn.Dropout2d(0.5), (3, 40, 5, 5)), (nn.Dropout3d(0.5), (3, 40, 2, 2, 2))],
)
def test_channels_are_dropped_as_a_whole(layer: nn.Module, shape: tuple[int, ...]) -> None:
    y = drawn(layer, torch.ones(shape)).flatten(2)
    assert torch.equal(y, y[:, :, :1].expand_as(y))
    assert set(y.unique().tolist()) == {0.0, 2.0}


def test_in_place() -> None:
    x = torch.ones(4, 50)
    y = drawn(nn.Dropout(0.5, inplace=True), x)
    assert y.data_ptr() == x.data_ptr()
    assert torch.equal(y, drawn(nn.Dropout(0.5), torch.ones(4, 50)))


def test_what_a_mask_depends_on() -> None:
    def mask(client: int = 0, epoch: int = 0, sample: int = 0, call: int = 0) -> Tensor:
        key = random.derive(random.derive(KEY, client), random.DROPOUT, epoch)
        return drawn(lambda x: [F.dropout(x) for _ in range(call + 1)][call], torch.ones(1, 64), key, sample)[0]

    cases = [{}, {"client": 1}, {"epoch": 1}, {"sample": 1}, {"call": 1}]
    for i, one in enumerate(cases):
        assert torch.equal(mask(**one), mask(**one))
        assert not any(torch.equal(mask(**one), mask(**other)) for other in cases[:i])
    whole = drawn(F.dropout, torch.ones(3, 64))
    assert all(torch.equal(whole[i], drawn(F.dropout, torch.ones(1, 64), first=i)[0]) for i in range(3))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **how: bool) -> None:
        super().__init__()
        self.rows, self.first = kind(12, 6, 3, dropout=0.4, **how), how.get("batch_first", False)
        self.fc = nn.Linear(6 * (1 + how.get("bidirectional", False)), 4)

    def forward(self, x: Tensor) -> Tensor:
        series = x.squeeze(1) if self.first else x.squeeze(1).transpose(0, 1)
        out, _ = self.rows(series)
        return self.fc(out[:, -1] if self.first else out[-1])  # type: ignore[no-any-return]


HASHED = {
    "transformer": Transformer(0.2),
    "attention with weights": Net(
        lambda net, x: net.fc(net.attention(*[x.squeeze(1)] * 3, need_weights=True)[0].mean(1)),
        attention=nn.MultiheadAttention(12, 2, dropout=0.3, batch_first=True),
        fc=nn.Linear(12, 4),
    ),
    "lstm": Recurrent(nn.LSTM, batch_first=True),
    "lstm in both directions": Recurrent(nn.LSTM, batch_first=True, bidirectional=True),
    "gru, time first": Recurrent(nn.GRU),
    "rnn": Recurrent(nn.RNN, batch_first=True),
}
HIDDEN = {
    "torch.rand": Net(
        lambda net, x: net.fc((x * torch.rand(()) if net.training else x).flatten(1)), fc=nn.Linear(144, 4)
    ),
    "rows that are not samples": Net(
        lambda net, x: net.fc(F.dropout(x.squeeze(1).transpose(0, 1), 0.3, net.training)[0]), fc=nn.Linear(12, 4)
    ),
    "weights": Net(
        lambda net, x: F.linear(x.flatten(1), F.dropout(net.fc.weight, 0.3, net.training)), fc=nn.Linear(144, 4)
    ),
}


@pytest.mark.parametrize("network", HASHED.values(), ids=list(HASHED))
def test_layers_whose_dropout_is_replaced(network: nn.Module) -> None:
    """torch's stream is not used, and without dropout the result is torch's."""
    x = torch.randn(2, 1, 12, 12)
    assert dropout.is_replaced(network, x)
    network.train()
    assert not torch.equal(drawn(network, x), drawn(network, x, random.seed_key(6)))
    for layer in network.modules():
        if hasattr(layer, "dropout") and isinstance(layer.dropout, float):
            layer.dropout = 0.0
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    assert not any(draws(layer) for layer in network.modules())
    torch.testing.assert_close(drawn(network, x), network(x))


@pytest.mark.parametrize("network", HIDDEN.values(), ids=list(HIDDEN))
def test_what_cannot_be_replaced_is_known(network: nn.Module) -> None:
    assert not dropout.is_replaced(network, torch.randn(2, 1, 12, 12))


@pytest.mark.parametrize("form", ["plain", "causal", "bool", "float", "grouped"])
def test_attention_is_that_of_torch(form: str) -> None:
    """With dropout whose masks keep everything, by a p below the smallest step."""
    query, key, value = torch.randn(3, 2, 4, 5, 6, dtype=torch.float64)
    mask = torch.ones(5, 5).tril().bool()
    mask[2] = False  # a row that sees nothing
    settings: dict[str, object] = {
        "plain": {},
        "causal": {"is_causal": True, "scale": 0.3},
        "bool": {"attn_mask": mask},
        "float": {"attn_mask": torch.randn(5, 5, dtype=torch.float64)},
        "grouped": {"enable_gqa": True},
    }[form]  # type: ignore[assignment]
    if form == "grouped":
        key, value = key[:, :2], value[:, :2]
    with dropout.known(KEY, torch.arange(2)), dropout.hashed():
        found = F.scaled_dot_product_attention(query, key, value, dropout_p=1e-9, **settings)  # type: ignore[arg-type]
    torch.testing.assert_close(found, F.scaled_dot_product_attention(query, key, value, **settings))  # type: ignore[arg-type]


def test_attention_stacked_equals_looped() -> None:
    model = make_model(Transformer(0.2), toy.SHAPE, toy.CLASSES).to("cpu", torch.float64)
    method, data = toy.method("ditto", local_epochs=1), toy.toy(augmented=False)
    expected, _ = toy.looped(method, model, data, rounds=1)
    assert toy.distance(expected, toy.stacked(method, model, data, rounds=1)[0]) < 1e-10


def test_evaluation_never_draws() -> None:
    model = toy.model(dropout=0.5)
    x, y = torch.randint(0, 255, (6, *toy.SHAPE), dtype=torch.uint8), torch.zeros(6, dtype=torch.int64)
    batch = Batch(x, y, torch.arange(6), key=KEY)
    plain = model(model.start, x)
    assert torch.equal(batch.give(lambda batch: model(model.start, batch.x)), plain)


class Checkpointed(nn.Module):
    """Its hidden layer runs again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Sequential(nn.Linear(144, 8), nn.Dropout(0.5))
        self.head = nn.Linear(8, toy.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.utils.checkpoint.checkpoint(self.hidden, x.flatten(1), use_reentrant=False)
        logits: Tensor = self.head(z)
        return logits


def test_layers_that_run_again_are_left_to_torch() -> None:
    """In the backward pass, the masks of the forward pass would not be known."""
    model = make_model(Checkpointed(), toy.SHAPE, toy.CLASSES)
    assert model.draws
    assert model.hidden_draws == model.draws
    plain = nn.Sequential(nn.Flatten(), nn.Linear(144, 8), nn.Dropout(0.5), nn.Linear(8, toy.CLASSES))
    assert not make_model(plain, toy.SHAPE, toy.CLASSES).hidden_draws
