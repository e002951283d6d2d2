"""Networks for series, tokens and images by name: shapes, sizes, refusals, and the same results looped and stacked."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import coterie
from coterie.core.data import FederatedData, Split
from coterie.core.errors import CoterieError
from coterie.core.model import Model, make_model
from coterie.execution.choice import Execution, fastest
from coterie.models import build, make_network
from coterie.models.attention import SelfAttention, attend
from tests import toy

CLASSES, WORDS = 3, 9
TINY = [  # name, shape, options
    ("cnn1d", (3, 12), {}),
    ("lstm", (6, 3), {}),
    ("lstm", (6,), {"vocabulary": WORDS}),
    ("transformer", (6, 3), {"depth": 1}),
    ("transformer", (6,), {"vocabulary": WORDS, "depth": 2}),
    ("vit-tiny", (3, 8, 4), {"depth": 1}),
    ("vit-tiny", (1, 6, 6), {"depth": 1, "patch": 3}),
    ("resnet18-gn", (3, 4, 4), {}),
    ("mobilenet", (3, 8, 8), {}),
]


def cases(*names: str) -> pytest.MarkDecorator:
    """The tiny networks with these names, or all."""
    chosen = [
        pytest.param(name, *given, marks=[pytest.mark.long] * (name in ("mobilenet", "resnet18-gn")))
        for name, *given in TINY
        if not names or name in names
    ]
    return pytest.mark.parametrize(("name", "shape", "options"), chosen, ids=str)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def samples(count: int, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    if len(shape) == 1:
        return torch.randint(0, WORDS, (count, *shape), generator=draw)
    return torch.randn(count, *shape, generator=draw)


def federation(shape: tuple[int, ...], train: tuple[int, ...] = (5, 3, 1)) -> FederatedData:
    """Clients of different size, one of them with a single sample."""

    def split(sizes: tuple[int, ...], seed: int) -> Split:
        y = torch.randint(0, CLASSES, (sum(sizes),), generator=torch.Generator().manual_seed(seed))
        return Split(samples(sum(sizes), shape, seed), y, sizes)

    return FederatedData("tiny", CLASSES, split(train, 1), split((2,) * len(train), 2))


def model_of(name: str, shape: tuple[int, ...], options: dict[str, Any]) -> Model:
    data = federation(shape)
    return make_network(name, data, 0, model_args=options).to("cpu", torch.float64)


# Outputs


@cases()
def test_the_head_is_one_layer_on_a_vector(name: str, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    network, x = build(name, shape, CLASSES, seed=0, **options), samples(4, shape)
    model = make_model(network, shape, CLASSES, sample_type=x.dtype)
    assert isinstance(model.head, nn.Linear)
    z = model.features(model.start.encoder, x)
    assert z.shape == (4, model.dim)
    torch.testing.assert_close(model.logits(model.start.head, z), network(x))
    assert network(x).shape == (4, CLASSES)
    assert not list(network.buffers())
    assert not model.draws


@cases()
def test_learns(name: str, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    network, x = build(name, shape, CLASSES, seed=0, **options), samples(6, shape)
    lr = 0.003 if name == "lstm" else 0.0005  # the deep networks diverge at the LSTM's rate
    y, optimizer = torch.arange(6) % CLASSES, torch.optim.Adam(network.parameters(), lr)
    losses = []
    for _ in range(20):
        loss = nn.functional.cross_entropy(network(x), y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.3 * losses[0]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 7])
def test_short_series(steps: int) -> None:
    network = build("cnn1d", (2, steps), CLASSES, seed=0)
    assert network(torch.randn(2, 2, steps)).shape == (2, CLASSES)
    pools = sum(isinstance(m, nn.MaxPool1d) for m in network.modules())
    assert pools == min(2, int(math.log2(steps)))


# Attention


def test_attention_is_the_softmax_formula() -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 5, 8, generator=draw, dtype=torch.float64)
    scores = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(8)
    weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
    expected = torch.einsum("bhij,bhjd->bhid", weights, v)
    torch.testing.assert_close(attend(q, k, v), expected, rtol=1e-12, atol=1e-12)
    stacked = torch.func.vmap(attend)(q[None], k[None], v[None])[0]
    torch.testing.assert_close(stacked, expected, rtol=1e-12, atol=1e-12)


def test_attention_is_torchs_with_the_same_weights() -> None:
    torch.manual_seed(0)
    ours, theirs = SelfAttention(12, 3).double(), nn.MultiheadAttention(12, 3, batch_first=True).double()
    theirs.load_state_dict(
        {
            "in_proj_weight": ours.qkv.weight,
            "in_proj_bias": ours.qkv.bias,
            "out_proj.weight": ours.out.weight,
            "out_proj.bias": ours.out.bias,
        }
    )
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x, x, x)[0], rtol=1e-12, atol=1e-12)


def test_patches_are_those_of_a_convolution() -> None:
    """Patches and a linear layer: a convolution whose stride is its kernel."""
    network = build("vit-tiny", (3, 8, 12), CLASSES, seed=0)
    patches, linear = network.encoder[0], network.encoder[1]
    x = torch.randn(2, 3, 8, 12).to(memory_format=torch.channels_last)
    expected = nn.functional.conv2d(x, linear.weight.view(192, 3, 4, 4), linear.bias, stride=4)
    torch.testing.assert_close(linear(patches(x)), expected.flatten(2).transpose(1, 2), rtol=1e-5, atol=1e-5)


def test_order_of_tokens_matters() -> None:
    network, x = build("transformer", (6,), CLASSES, seed=0, vocabulary=WORDS), torch.arange(6)[None]
    assert not torch.allclose(network(x), network(x.flip(1)))


@pytest.mark.parametrize("name", ["transformer", "lstm"])
def test_outputs_per_token_do_not_depend_on_later_tokens(name: str) -> None:
    network, x = build(name, (6,), WORDS, seed=0, vocabulary=WORDS, per_token=True), torch.arange(6)[None]
    changed = x.clone()
    changed[0, 4] = 0
    before, after = network(x), network(changed)
    assert before.shape == (1, 6, WORDS)
    torch.testing.assert_close(before[:, :4], after[:, :4], rtol=0, atol=1e-6)
    assert not torch.allclose(before[:, 4], after[:, 4])


@pytest.mark.parametrize("name", ["transformer", "lstm"])
def test_next_token_by_name(name: str) -> None:
    """The task brings vocabulary and outputs per token; looped equals streams, and stacked where vmap can."""
    data, _ = toy.of_task("next-token")
    model = make_network(name, data, 0, model_args={"depth": 1} if name == "transformer" else {"hidden": 8})
    model, method = model.to("cpu", torch.float64), toy.method("fedper", batch_size=4, local_epochs=1)
    looped, _ = toy.looped(method, model, data, rounds=1)
    others = [toy.streams(method, model, data, recorded=name != "lstm", rounds=1)]  # LSTMs: by CUDA only
    if name == "transformer":
        others.append(toy.stacked(method, model, data, rounds=1))
    for found, _ in others:
        assert toy.distance(looped, found) < 1e-10


# Looped and stacked


@cases("cnn1d", "transformer", "vit-tiny", "mobilenet", "resnet18-gn")
def test_looped_is_stacked(name: str, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    data, model, method = federation(shape), model_of(name, shape, options), toy.method("fedrep", batch_size=4)
    looped, _ = toy.looped(method, model, data, rounds=1, join_ratio=1)
    stacked, _ = toy.stacked(method, model, data, rounds=1, join_ratio=1)
    assert toy.distance(looped, stacked) < 1e-10


@pytest.mark.parametrize(
    ("name", "device", "backend"),
    [
        ("lstm", "cpu", "looped"),
        ("lstm", "cuda", "streams"),
        ("transformer", "cuda", "stacked"),
    ],
)
def test_an_lstm_is_not_stacked(name: str, device: str, backend: str) -> None:
    data = federation((6, 3), train=(2,) * 8)
    model = make_network(name, data, 0, model_args={} if name == "lstm" else {"depth": 1})
    assert fastest(toy.method("fedavg"), model, data, device, Execution()).backend == backend


@cases("cnn1d", "transformer")
def test_bf16_stacked(name: str, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    data, method = federation(shape), toy.method("fedavg", batch_size=4)
    model = replace(make_network(name, data, 0, model_args=options), precision="bf16")
    results = [run(method, model, data, rounds=1)[0] for run in (toy.looped, toy.stacked)]
    assert toy.distance(*results) < 0.02


def test_an_lstm_cannot_be_stacked() -> None:
    with pytest.raises(CoterieError, match=r"clients cannot be stacked: .*lstm.*; use backend=looped, streams or auto"):
        coterie.run("fedavg", federation((6, 3)), "lstm", rounds=1, backend="stacked")


# Refusals


@pytest.mark.parametrize(
    ("name", "shape", "options", "message"),
    [
        ("cnn1d", (1, 28, 28), {}, r"'cnn1d' takes series (channels, time), got samples of shape (1, 28, 28)"),
        ("cnn1d", (13,), {}, r"'cnn1d' takes series (channels, time), got samples of shape (13,)"),
        ("cnn1d", (3, 0), {}, r"'cnn1d' takes series (channels, time)"),
        ("lstm", (12,), {}, r"tokens (time,) with --model-args vocabulary=N, got samples of shape (12,)"),
        ("lstm", (3, 8, 8), {}, r"'lstm' takes series (time, features), or tokens"),
        ("lstm", (6, 3), {"vocabulary": 9}, r"'lstm' takes tokens (time,) if vocabulary is set"),
        ("lstm", (6,), {"vocabulary": "many"}, "vocabulary of model 'lstm' must be an integer of at least 2"),
        ("lstm", (6, 3), {"hidden": 0}, "hidden of model 'lstm' must be at least 1, got 0"),
        ("transformer", (12,), {}, r"'transformer' takes series (time, features), or tokens (time,) with"),
        ("transformer", (12,), {"vocabulary": 1}, "vocabulary of model 'transformer' must be an integer"),
        ("transformer", (6, 3), {"depth": 0}, "depth of model 'transformer' must be a positive integer, got 0"),
        ("vit-tiny", (3, 30, 32), {}, "height and width are multiples of patch=4, got samples of shape (3, 30, 32)"),
        ("vit-tiny", (3, 32, 32), {"patch": 2.5}, "patch of model 'vit-tiny' must be a positive integer, got 2.5"),
        ("resnet18-gn", (3, 8, 8), {"groups": 3}, "groups of model 'resnet18-gn' must divide 64, got 3"),
    ],
)
def test_refusals(name: str, shape: tuple[int, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(CoterieError) as error:
        build(name, shape, CLASSES, seed=0, **options)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["lstm", "transformer"])
def test_tokens_outside_the_vocabulary(name: str) -> None:
    data = federation((6,))
    with pytest.raises(CoterieError, match=r"vocabulary=5 allows tokens from 0 to 4, but the data .* from 0 to 8"):
        coterie.run("fedavg", data, name, rounds=1, model_args={"vocabulary": 5})
    network = build(name, (6,), CLASSES, seed=0, vocabulary=5)
    with pytest.raises(CoterieError, match=r"tokens must be from 0 to 4 \(vocabulary=5\)"):
        network(torch.full((1, 6), 5))


@pytest.mark.parametrize(("rows", "shift", "refused"), [(8, 0, True), (9, 0, False), (9, 1, True), (10, 1, False)])
def test_an_embedding_of_a_user_that_is_too_small(rows: int, shift: int, refused: bool) -> None:
    """One line before training, for the numbers that the embedding is given, which the network may shift."""

    class Shifted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + shift

    tokens = torch.arange(12)[:, None].remainder(8).repeat(1, 5)
    tokens[11, 3] = 8  # one sample of the last client
    held = Split(tokens, torch.arange(12) % 2, (4, 8))
    data = FederatedData("tokens", 2, held, held)
    network = nn.Sequential(Shifted(), nn.Embedding(rows, 3), nn.Flatten(), nn.Linear(15, 2))
    if refused:
        given = rf"these samples give it numbers from {shift} to {8 + shift}; make it nn.Embedding\({9 + shift}, ...\)"
        with pytest.raises(CoterieError, match=rf"the embedding '1' of this network has {rows} rows, .*, but {given}"):
            coterie.run("fedavg", data, network, rounds=1, local_epochs=1, progress=False)
    else:
        make_network(network, data, 0)


def test_numbers_are_not_tokens() -> None:
    rows = Split(torch.randn(4, 6), torch.arange(4) % 2, (2, 2))
    table = FederatedData("t", 2, rows, rows)
    with pytest.raises(CoterieError, match="the model cannot take float32 samples of shape 6"):
        coterie.run("fedavg", table, "lstm", rounds=1, model_args={"vocabulary": 5})


# Segmentation


def masks(sizes: tuple[int, ...] = (5, 3, 1), side: tuple[int, int] = (7, 6)) -> FederatedData:
    """The mask of a sample: where its first channel is positive; a corner is ignored."""

    def split(sizes: tuple[int, ...], seed: int) -> Split:
        x = samples(sum(sizes), (2, *side), seed)
        y = (x[:, 0] > 0).long()
        y[:, 0, 0] = -1
        return Split(x, y, sizes)

    return FederatedData("tiny", 0, split(sizes, 1), split((2,) * len(sizes), 2), task=coterie.Segmentation(2))


def test_unet_is_a_map_of_logits_looped_and_stacked() -> None:
    data = masks()
    model = make_network("unet", data, 0, model_args={"width": 8}).to("cpu", torch.float64)
    assert model(model.start, data.test.x).shape == (6, 2, 7, 6)
    assert {n for n, _ in build("unet", (1, 28, 28), 3, seed=0).named_children()} == {"encoder", "head"}
    method = toy.method("fedrep", batch_size=4, local_epochs=1)
    looped, _ = toy.looped(method, model, data, rounds=1, join_ratio=1)
    stacked, _ = toy.stacked(method, model, data, rounds=1, join_ratio=1)
    assert toy.distance(looped, stacked) < 1e-10


def test_unet_sees_the_neighbours_of_a_pixel() -> None:
    """Every output depends on the whole neighbourhood, and full-size features reach the head by the shortcut."""
    network = build("unet", (1, 16, 16), 2, seed=0)
    x = torch.randn(1, 1, 16, 16, requires_grad=True)
    slope = torch.autograd.grad(network(x)[0, 0, 8, 8], x)[0][0, 0]
    assert int((slope != 0).sum()) > 100
    assert slope[8, 8] != 0


def test_methods_that_need_a_class_per_sample_refuse_masks() -> None:
    with pytest.raises(CoterieError, match="FedProto needs one class per sample, so it cannot be used for segmenta"):
        coterie.run("fedproto", masks(), "unet", rounds=1, progress=False)
    with pytest.raises(CoterieError, match=r"must return logits of shape \(2, 7, 6\).*; model='unet' does"):
        coterie.run("fedavg", masks(), "mlp", rounds=1, progress=False)
    with pytest.raises(CoterieError, match="one logit for each of 3 classes"):
        coterie.run("fedavg", federation((1, 8, 8)), "unet", rounds=1, progress=False)
    with pytest.raises(CoterieError, match="width must be a multiple of 8, got 3"):
        build("unet", (1, 8, 8), 2, seed=0, width=3)
