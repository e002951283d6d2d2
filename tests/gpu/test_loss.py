"""Fused cross entropy and means against torch's own, in value and gradient. Without a GPU, Triton interprets them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap

from coterie.core import ops
from coterie.core.batch import Batch
from coterie.core.errors import CoterieError
from coterie.core.losses import balanced_cross_entropy, cross_entropy
from coterie.gpu import loss
from coterie.gpu.kernels.loss import TILE
from coterie.gpu.operations import Fused

pytestmark = pytest.mark.usefixtures("interpreted")


@pytest.fixture(autouse=True)
def fused() -> Iterator[None]:
    with ops.use(Fused()):
        yield


def torchs(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, reduction="none")


def slope(f: object, logits: Tensor, y: Tensor, factors: Tensor) -> Tensor:
    """Each sample's loss has its own gradient."""
    made: Tensor = grad(lambda u: (f(u, y) * factors).sum())(logits)  # type: ignore[operator]
    return made


@pytest.mark.parametrize(("samples", "classes"), [(90, 2), (41, 10), (2, 700)])
def test_losses_and_gradients_of_clients_side_by_side(samples: int, classes: int) -> None:
    logits = 5 * torch.randn(3, samples, classes, dtype=torch.float64)
    y, factors = torch.randint(0, classes, (3, samples)), torch.randn(3, samples, dtype=torch.float64)
    torch.testing.assert_close(vmap(cross_entropy)(logits, y), vmap(torchs)(logits, y), rtol=0, atol=1e-13)
    made, expected = (vmap(lambda *given, f=f: slope(f, *given))(logits, y, factors) for f in (cross_entropy, torchs))
    torch.testing.assert_close(made, expected, rtol=0, atol=1e-14)


def test_several_models_of_each_client() -> None:
    """They share its labels."""
    logits = torch.randn(3, 2, 5, 4, dtype=torch.float64)
    y, factors = torch.randint(0, 4, (3, 5)), torch.randn(5, dtype=torch.float64)
    made, expected = (
        vmap(vmap(lambda u, y, f=f: slope(f, u, y, factors), in_dims=(0, None)))(logits, y)
        for f in (cross_entropy, torchs)
    )
    torch.testing.assert_close(made, expected, rtol=0, atol=1e-14)


def test_digits_survive_large_logits_and_absent_classes() -> None:
    logits, y = 1e4 + torch.randn(6, 4), torch.tensor([0, 1, 3, 0, 1, 3])
    counts = torch.tensor([5.0, 2.0, 0.0, 9.0])  # the third class has a prior of -1e9
    prior = counts.log().clamp_min(-1e9)
    factors = torch.ones(6)
    torch.testing.assert_close(cross_entropy(logits, y), torchs(logits, y))
    torch.testing.assert_close(balanced_cross_entropy(logits, y, counts), torchs(logits + prior, y))
    made = slope(lambda u, y: balanced_cross_entropy(u, y, counts), logits, y, factors)
    torch.testing.assert_close(made, slope(lambda u, y: torchs(u + prior, y), logits, y, factors))
    assert not made[:, 2].any()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, which interprets
def test_what_is_not_finite_comes_out_as_of_torch() -> None:
    inf, nan = torch.inf, torch.nan
    rows = [[1.0, inf, 2.0], [1.0, -inf, 2.0], [-inf, 1.0, 2.0], [nan, 1.0, 2.0], [-inf, -inf, -inf], [inf, inf, 0.0]]
    logits, y, factors = torch.tensor(rows), torch.zeros(6, dtype=torch.int64), torch.randn(6)
    made, expected = cross_entropy(logits, y), torchs(logits, y)
    assert expected.isfinite().tolist() == [False, True, False, False, False, False]
    torch.testing.assert_close(made, expected, equal_nan=True)
    torch.testing.assert_close(
        slope(cross_entropy, logits, y, factors), slope(torchs, logits, y, factors), equal_nan=True
    )


def test_losses_of_half_precision_are_in_single() -> None:
    """As autocast has it."""
    logits, y = torch.randn(5, 3, dtype=torch.float16), torch.randint(0, 3, (5,))
    made = cross_entropy(logits, y)
    assert made.dtype == torch.float32
    torch.testing.assert_close(made, torchs(logits.float(), y))
    given = logits, y, torch.randn(5)
    torch.testing.assert_close(slope(cross_entropy, *given), slope(lambda u, y: torchs(u.float(), y), *given))


def test_very_many_classes_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "cross_entropy", None)
    logits, y = torch.randn(2, loss.MAX_CLASSES + 1), torch.tensor([0, loss.MAX_CLASSES])
    torch.testing.assert_close(cross_entropy(logits, y), torchs(logits, y))


def mean(values: Tensor, real: Tensor) -> Tensor:
    return Batch(values, values, values, real).mean(values)


def mean_and_slope(values: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    slope, value = grad(lambda v: (3 * mean(v, real), mean(v, real)), has_aux=True)(values)
    return value, slope


@pytest.mark.parametrize("batch", [5, 2 * TILE + 3])
def test_means_are_those_of_the_real_samples(batch: int) -> None:
    """Of two models each; the third client's batch is padding, and what padding gives is not a number."""
    real = torch.rand(3, batch) < 0.5
    real[0], real[1, :2], real[2] = True, torch.tensor([True, False]), False
    values = torch.where(real[:, None], torch.randn(3, 2, batch, dtype=torch.float64), torch.nan)
    made, slopes = vmap(vmap(mean_and_slope, in_dims=(0, None)))(values, real)
    for client, model in ((0, 0), (0, 1), (1, 0), (1, 1)):
        on = real[client]
        torch.testing.assert_close(made[client, model], values[client, model, on].mean(), rtol=0, atol=1e-14)
        torch.testing.assert_close(slopes[client, model], 3 * on.double() / on.sum(), rtol=0, atol=1e-14)
    assert made[2].tolist() == [0, 0]
    assert not slopes[2].any()


def test_a_value_for_all_samples_is_its_own_mean() -> None:
    value, slope = mean_and_slope(torch.tensor(2.5), torch.tensor([True, False, True]))
    assert (float(value), float(slope)) == (2.5, 3.0)


def test_second_derivatives_of_one_client_and_of_several() -> None:
    """The plain operations have them; the fused ones say that they do not."""
    logits, y = torch.randn(2, 5, 3, dtype=torch.float64), torch.randint(0, 3, (2, 5))

    def twice(u: Tensor, y: Tensor, f: object = cross_entropy) -> Tensor:
        made: Tensor = grad(lambda v: slope(f, v, y, v[:, 0]).square().sum())(u)
        return made

    with ops.use(ops.Operations()):
        torch.testing.assert_close(twice(logits[0], y[0]), twice(logits[0], y[0], torchs))
    with pytest.raises(CoterieError, match="use backend=looped"):
        vmap(twice)(logits, y)
