"""Local training against torch's own optimiser, and what the batches are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.core import random, tree
from coterie.core.batch import Batch, Data, features
from coterie.core.data import Transform
from coterie.core.errors import CoterieError
from coterie.core.losses import cross_entropy
from coterie.core.model import Weights
from coterie.core.ops import augment
from coterie.core.training import LocalTraining
from tests import toy


def data(n: int = 21, key: int = 5, transform: Transform | None = None, rate: float = 1.0) -> Data:
    held = toy.split((n,), 4)
    factor = torch.tensor(rate, dtype=torch.float64)
    return Data(held.x, held.y, random.seed_key(key), factor, toy.CLASSES, transform or Transform((0.5,), (0.5,)))


def torch_sgd(net: nn.Module, d: Data, sgd: LocalTraining, optimiser: torch.optim.SGD) -> None:
    """The same, as everybody writes it."""
    for epoch in range(sgd.local_epochs):
        shuffled = random.shuffle(random.derive(d.key, random.SHUFFLE, epoch), len(d.y))
        for index in torch.split(shuffled, sgd.batch_size):
            if sgd.drop_last and len(index) < sgd.batch_size:
                continue
            optimiser.zero_grad()
            x = (d.x[index].double() / 255 - 0.5) / 0.5
            F.cross_entropy(net(x), d.y[index]).backward()
            optimiser.step()


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.9, 0.0), (0.5, 0.01)])
def test_sgd_is_torchs_sgd(momentum: float, decay: float, drop_last: bool, batch_norm: bool) -> None:
    net = toy.network(batch_norm).double()
    model = toy.model(batch_norm=batch_norm)
    sgd = LocalTraining(
        local_epochs=3,
        batch_size=8,
        lr=0.05,
        momentum=momentum,
        weight_decay=decay,
        drop_last=drop_last,
        keep_momentum=True,
    )
    optimiser = torch.optim.SGD(net.parameters(), lr=0.05, momentum=momentum, weight_decay=decay)
    weights, kept = model.start, sgd.start(model.start)
    for key in (1, 2):  # two rounds, the optimiser goes on
        d = data(key=key)
        weights, kept = sgd(weights, lambda w, b: cross_entropy(model(w, b.x), b.y), d, kept)
        torch_sgd(net, d, sgd, optimiser)
    ours = {**weights.encoder, **{f"{len(net) - 1}.{k}": v for k, v in weights.head.items()}}
    theirs = {k: v for k, v in net.state_dict().items() if not k.endswith("num_batches_tracked")}
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-9, atol=1e-12)


def test_what_is_closed_over_stays_frozen() -> None:
    """Neither weight decay nor momentum nor BatchNorm reaches a part that is not trained."""
    model = toy.model(batch_norm=True)
    before = tree.apply(lambda t: t.clone(), model.start)
    sgd = LocalTraining(local_epochs=2, batch_size=8, lr=0.1, momentum=0.9, weight_decay=0.1)
    encoder = model.start.encoder

    def head_loss(head: tree.Tree, batch: Batch) -> Tensor:
        return cross_entropy(model(Weights(encoder, head), batch.x), batch.y)

    head, _ = sgd(model.start.head, head_loss, data(), {})
    toy.assert_same(tree.flatten(before), tree.flatten(model.start))
    assert toy.distance(head, before.head) > 0


def test_momentum_is_forgotten_or_kept() -> None:
    model, params = toy.model(), toy.model().start
    step = {"local_epochs": 1, "batch_size": 8, "lr": 0.05, "momentum": 0.9}
    loss = lambda w, b: cross_entropy(model(w, b.x), b.y)  # noqa: E731
    for keep in (True, False):
        sgd = LocalTraining(**step, keep_momentum=keep)  # type: ignore[arg-type]
        once, memory = sgd(params, loss, data(key=1), sgd.start(params))
        again, _ = sgd(once, loss, data(key=2), memory)
        fresh, _ = sgd(once, loss, data(key=2), {})
        assert bool(memory) is keep
        assert (toy.distance(tree.flatten(again), tree.flatten(fresh)) > 0) is keep


def test_rate_scales_the_learning_rate() -> None:
    model = toy.model()
    loss = lambda w, b: cross_entropy(model(w, b.x), b.y)  # noqa: E731
    half, _ = LocalTraining(lr=0.1, batch_size=8)(model.start, loss, data(rate=0.5), {})
    plain, _ = LocalTraining(lr=0.05, batch_size=8)(model.start, loss, data(), {})
    assert toy.distance(tree.flatten(half), tree.flatten(plain)) < 1e-12


def test_every_epoch_sees_every_sample_once_in_a_new_order() -> None:
    model, seen = toy.model(), list[int]()

    def record(weights: Weights, batch: Batch) -> Tensor:
        seen.extend(batch.sample.tolist())
        return cross_entropy(model(weights, batch.x), batch.y)

    LocalTraining(local_epochs=2, batch_size=8)(model.start, record, data(21), {})
    first, second = seen[:21], seen[21:]
    assert sorted(first) == sorted(second) == list(range(21))
    assert first != second


def plain_crop(x: Tensor, draws: Tensor, pad: int, flip: bool) -> Tensor:
    """One image after the other: pad, mirror, cut out."""
    out = []
    for image, draw in zip(x, draws.tolist(), strict=True):
        down, right = draw % (2 * pad + 1), (draw >> 20) % (2 * pad + 1)
        wide = F.pad(image, (pad, pad, pad, pad))
        cut = wide[:, down : down + x.shape[2], right : right + x.shape[3]]
        out.append(cut.flip(2) if flip and (draw >> 40) & 1 else cut)
    return torch.stack(out)


@pytest.mark.parametrize("flip", [False, True])
def test_augmentation_is_crop_and_flip(flip: bool) -> None:
    x = torch.randint(0, 256, (40, 3, 7, 6), dtype=torch.uint8)
    draws = random.bits(random.seed_key(1), torch.arange(40))
    assert torch.equal(augment(x, draws, Transform(crop=2, flip=flip)), plain_crop(x, draws, 2, flip))


def test_augmentation_differs_by_epoch_and_round_but_not_by_order() -> None:
    d = data(20, transform=Transform((0.5,), (0.5,), crop=2, flip=True))
    index = torch.tensor([4, 0, 9])
    assert torch.equal(d.batch(index, 0).x, d.batch(index.flip(0), 0).x.flip(0))
    assert not torch.equal(d.batch(index, 0).x, d.batch(index, 1).x)
    other = data(20, key=6, transform=d.transform)
    assert not torch.equal(d.batch(index, 0).x, other.batch(index, 0).x)


def test_features_are_those_of_all_samples() -> None:
    model, d = toy.model(), data(300)
    torch.testing.assert_close(features(model, model.start.encoder, d), model.features(model.start.encoder, d.x))


@pytest.mark.parametrize(
    "wrong", [{"local_epochs": -1}, {"batch_size": 0}, {"lr": -0.1}, {"lr": float("nan")}, {"momentum": -1}]
)
def test_impossible_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(CoterieError, match=r"must be (at least|finite)"):
        LocalTraining(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("n", [1, 2, 7, 21])
def test_a_split_is_the_same_with_padding(n: int) -> None:
    """A fifth, at least one sample, and all the others; both parts in the same order."""
    d = data(n)
    padded = replace(
        d,
        x=torch.cat([d.x, d.x[:1].expand(9, *d.x.shape[1:])]),
        y=torch.cat([d.y, d.y[:1].expand(9)]),
        real=torch.arange(n + 9) < n,
    )
    seen = []
    for whole in (d, padded):
        part, others = whole.split(0.2)
        kept = part.x if part.real is None else part.x[part.real]
        assert len(kept) == int(part.samples) == max(n // 5, 1)
        assert int(others.samples) == n - len(kept)
        (run,) = LocalTraining(local_epochs=1, batch_size=4).runs(others)
        samples = [b.sample if b.real is None else b.sample[b.real] for b in run]
        index = torch.cat([*samples, torch.zeros(0, dtype=torch.int64)])
        assert sorted(map(bytes, torch.cat([kept, d.x[index]]).numpy())) == sorted(map(bytes, d.x.numpy()))
        seen.append((kept, index))
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


def test_a_split_of_known_size_leaves_no_padding_in_a_batch() -> None:
    """So nothing needs to be masked."""
    _, others = data(21).split(0.2)
    assert [len(batch.y) for run in LocalTraining(local_epochs=1, batch_size=8).runs(others) for batch in run] == [
        8,
        8,
        1,
    ]
    assert [
        len(batch.y)
        for run in LocalTraining(local_epochs=1, batch_size=8, drop_last=True).runs(others)
        for batch in run
    ] == [8, 8]
    for run in LocalTraining(batch_size=8).runs(others):
        assert run.drawn.real is None
        assert others.real is not None
        assert others.real[run.drawn.sample].all()


@pytest.mark.parametrize(("transform", "draws", "expected"), [
    (Transform(), False, 0),
    (Transform(), True, 2),
    (Transform(flip=True), False, 3),
])  # fmt: skip
def test_only_what_is_drawn_is_hashed(
    transform: Transform, draws: bool, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    d, hashes, scramble = replace(data(transform=transform), draws=draws), [], random.scramble
    monkeypatch.setattr(random, "scramble", lambda x: hashes.append(x) or scramble(x))
    batch = d.batch(torch.arange(4), 0)
    assert len(hashes) == expected
    assert (batch.key is not None) == draws
