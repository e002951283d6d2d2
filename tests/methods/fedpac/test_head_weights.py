"""Head weights: cases solved by hand, properties, and daqp as an independent solver."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coterie.gpu import optimistic
from coterie.methods.fedpac import head_weights as solver
from coterie.methods.fedpac.active_sets import descend, exchange_sets
from coterie.methods.fedpac.head_weights import SimplexError, head_weights, optimistic_weights
from coterie.methods.fedpac.programs import build_programs, check_finite, gram_matrix, kkt_cosine, residuals, scale

F64 = torch.float64
seeds = st.integers(0, 2**31)
sizes = st.integers(1, 12)
properties = settings(max_examples=40, deadline=None, derandomize=True, database=None)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def random_clients(seed: int, clients: int, features: int = 15) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(clients, features, generator=generator, dtype=F64)
    return h, 0.01 + torch.rand(clients, generator=generator, dtype=F64) * 10


def kkt_residual(weights: Tensor, moments: Tensor, variances: Tensor) -> Tensor:
    """(S,): how far row i of the weights is from the minimum of client i, as a cosine; 0 is exact.

    Computed from the definition, not by the solver: the gradient is v a + <sum_l a_l h_l - h_i, h_j - h_i>, with
    variances below FLOOR raised to it as in `head_weights`. Negative weights and sums other than 1 count by their size.
    """
    h, gram, v = gram_matrix(moments, variances)
    check_finite(gram, v)
    return kkt_cosine(scale(gram, v), h, weights.detach().to(h))


def programs(h: Tensor, v: Tensor) -> Tensor:
    """(S, S, S): diag(v) + D_i as the paper writes it."""
    apart = h[:, None] - h[None]  # (i, j, :)
    return torch.einsum("ijf,ilf->ijl", apart, apart) + v.diag()


def objective(h: Tensor, v: Tensor, weights: Tensor) -> Tensor:
    """a^T (diag(v) + D_i) a as a sum of squares: no cancellation."""
    return (weights.square() * v).sum(1) + (weights @ h - h).square().sum(1)


def oracle(matrix: Tensor) -> Tensor:
    """daqp's answer to min a^T matrix a on the simplex, made feasible. Its tolerances are absolute: scale first."""
    import daqp  # not on every machine with a GPU

    clients = len(matrix)
    scaled = (matrix / matrix.diagonal().median().clamp_min(1e-300)).numpy()
    upper, lower = np.full(clients + 1, 1e30), np.zeros(clients + 1)
    upper[-1] = lower[-1] = 1.0
    sense = np.array([0] * clients + [5], dtype=np.int32)
    hessian = 2 * scaled + 1e-13 * np.eye(clients)
    a, _, flag, _ = daqp.solve(hessian, np.zeros(clients), np.ones((1, clients)), upper, lower, sense)
    if flag != 1:
        return torch.eye(clients, dtype=F64)[0]
    answer = torch.from_numpy(a).clamp_min(0)
    return answer / answer.sum()


# Cases solved by hand


def test_one_client() -> None:
    assert head_weights(torch.randn(1, 3, 4), torch.tensor([0.5])).tolist() == [[1.0]]
    assert head_weights(torch.zeros(1, 3), torch.zeros(1)).tolist() == [[1.0]]


def test_two_clients_in_closed_form() -> None:
    h, v = torch.tensor([[0.0, 0.0], [3.0, 4.0]], dtype=F64), torch.tensor([2.0, 5.0], dtype=F64)
    distance = 25.0
    own = [(v[1 - i] + distance) / (v[0] + v[1] + distance) for i in range(2)]
    expected = torch.tensor([[own[0], 1 - own[0]], [1 - own[1], own[1]]], dtype=F64)
    torch.testing.assert_close(head_weights(h, v), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("variance", [0.0, 1e-9, 3.0])
def test_identical_clients_share_equally(variance: float) -> None:
    weights = head_weights(torch.randn(1, 2, 5).expand(7, 2, 5), torch.full((7,), variance))
    torch.testing.assert_close(weights, torch.full((7, 7), 1 / 7, dtype=F64), rtol=0, atol=1e-12)


def test_equal_moments_weigh_by_inverse_variance() -> None:
    v = torch.tensor([1.0, 2.0, 4.0], dtype=F64)
    expected = (1 / v) / (1 / v).sum()
    torch.testing.assert_close(head_weights(torch.ones(3, 6), v), expected.expand(3, 3), rtol=0, atol=1e-14)


def test_a_distant_client_stands_alone() -> None:
    h, v = random_clients(0, 6)
    h[2] += 1e5
    weights = head_weights(h, v)
    assert weights[2, 2] > 1 - 1e-6
    others = [0, 1, 3, 4, 5]
    assert weights[others, 2].max() < 1e-5
    assert weights[others][:, others].min(1).values.max() > 1e-3  # and the others are not disturbed by it


def test_duplicates_without_variance_share_equally() -> None:
    h, v = random_clients(1, 5)
    h, v = h[[0, 0, 1, 2, 3, 0]], torch.zeros(6)
    weights = head_weights(h, v)
    torch.testing.assert_close(weights[:, 0], weights[:, 1], rtol=0, atol=1e-8)
    torch.testing.assert_close(weights[:, 0], weights[:, 5], rtol=0, atol=1e-8)
    assert abs(float(weights[0, 0]) - 1 / 3) < 1e-6


def test_shape_and_type_of_the_moments_do_not_matter() -> None:
    h, v = random_clients(2, 8, 12)
    flat = head_weights(h, v)
    assert flat.dtype == F64
    assert torch.equal(flat, head_weights(h.view(8, 3, 4), v))
    torch.testing.assert_close(flat, head_weights(h.float(), v.float()), rtol=0, atol=1e-6)


# Properties


@properties
@given(seeds, sizes)
def test_rows_lie_on_the_simplex(seed: int, clients: int) -> None:
    weights = head_weights(*random_clients(seed, clients))
    assert weights.min() >= 0
    torch.testing.assert_close(weights.sum(1), torch.ones(clients, dtype=F64), rtol=0, atol=1e-14)


@properties
@given(seeds, sizes, st.floats(-6, 6))
def test_scale_does_not_matter(seed: int, clients: int, power: float) -> None:
    (h, v), scale = random_clients(seed, clients), 10.0**power
    torch.testing.assert_close(head_weights(h * scale, v * scale**2), head_weights(h, v), rtol=0, atol=1e-9)


@properties
@given(seeds, sizes)
def test_order_does_not_matter(seed: int, clients: int) -> None:
    h, v = random_clients(seed, clients)
    order = torch.randperm(clients, generator=torch.Generator().manual_seed(seed))
    expected = head_weights(h, v)[order][:, order]
    torch.testing.assert_close(head_weights(h[order], v[order]), expected, rtol=0, atol=1e-9)


@properties
@given(seeds, sizes, st.floats(-1e5, 1e5))
def test_a_common_shift_does_not_matter(seed: int, clients: int, shift: float) -> None:
    h, v = random_clients(seed, clients)
    torch.testing.assert_close(head_weights(h + shift, v), head_weights(h, v), rtol=0, atol=1e-8)


@properties
@given(seeds, st.integers(2, 8))
def test_residual_agrees_with_the_definition(seed: int, clients: int) -> None:
    h, v = random_clients(seed, clients)
    matrices = programs(h, v)
    weights = torch.rand(clients, clients, dtype=F64, generator=torch.Generator().manual_seed(seed))
    weights /= weights.sum(1, keepdim=True)
    value = torch.einsum("ij,ijl,il->i", weights, matrices, weights)
    torch.testing.assert_close(value, objective(h, v, weights))
    behind = value[:, None] - torch.einsum("ijl,il->ij", matrices, weights)
    lengths = matrices.diagonal(dim1=1, dim2=2).sqrt()
    expected = (behind / (value.sqrt()[:, None] * lengths)).amax(1).clamp_min(0)
    torch.testing.assert_close(kkt_residual(weights, h, v), expected, rtol=1e-9, atol=1e-12)


def test_residual_counts_what_is_not_feasible() -> None:
    h, v = random_clients(3, 3)
    weights = head_weights(h, v)
    assert kkt_residual(weights, h, v).max() < 1e-10
    assert kkt_residual(weights * 1.5, h, v).min() >= 0.49
    assert kkt_residual(torch.tensor([[2.0, -1.0, 0.0]]).expand(3, 3), h, v).min() >= 1


# daqp


@pytest.mark.parametrize("clients", [2, 5, 20, 60])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_equals_daqp(clients: int, scale: float) -> None:
    h, v = random_clients(clients, clients)
    weights, matrices = head_weights(h * scale, v * scale**2), programs(h, v)
    expected = torch.stack([oracle(matrix) for matrix in matrices])
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-7)
    torch.testing.assert_close(objective(h, v, weights), objective(h, v, expected), rtol=1e-9, atol=0)


def label_skewed(clients: int) -> tuple[Tensor, Tensor]:
    """Moments as of 10 classes x 128 features in float32: five groups, 80 % of whose samples are of 3 classes."""
    generator = torch.Generator().manual_seed(clients)
    means = torch.randn(10, 128, generator=generator).relu()
    common = torch.stack([torch.randperm(10, generator=generator)[:3] for _ in range(5)])  # (group, 3)
    shares = torch.full((clients, 10), 0.02).scatter_(1, common[torch.arange(clients) % 5], 0.02 + 0.8 / 3)
    shares = (shares + 0.01 * torch.randn(clients, 10, generator=generator)).clamp_min(0)
    own = means + 0.07 * torch.randn(clients, 10, 128, generator=generator)
    return shares[:, :, None] * own, 0.3 + 0.05 * torch.rand(clients, generator=generator)


@pytest.mark.parametrize("clients", [20, 100])
def test_moments_of_label_skewed_clients(clients: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As daqp, and without a second look at the moments, which may be on another device."""
    monkeypatch.setattr(solver, "descend", None)
    h, v = label_skewed(clients)
    weights = head_weights(h, v)
    assert 3 < (weights > 0).sum(1).double().mean() < clients / 2
    some = slice(0, clients, clients // 10)
    expected = torch.stack([oracle(matrix) for matrix in programs(h.double().flatten(1), v.double())[some]])
    torch.testing.assert_close(weights[some], expected, rtol=0, atol=1e-7)


@properties
@given(seeds, st.integers(2, 12))
def test_slow_descent_finds_the_same(seed: int, clients: int) -> None:
    """The fallback alone, from every client's own head."""
    h, v = random_clients(seed, clients)
    weights = torch.from_numpy(descend(build_programs(h, v), np.eye(clients)))
    assert weights.min() >= 0
    torch.testing.assert_close(weights, head_weights(h, v), rtol=0, atol=1e-8)


def test_rounding_errors_of_the_gram_matrix_do_not_pass() -> None:
    """A residual from the Gram matrix is never below that from the moments: what rounding can hide is added."""
    generator = torch.Generator().manual_seed(9)
    for _ in range(100):
        h, v = degenerate(generator)
        built = build_programs(h, v)
        weights = exchange_sets(built)
        assert bool((residuals(built, weights) >= residuals(built, weights, fresh=True)).all())


def degenerate(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Duplicates, clusters, offsets, odd scales, variances of 0, one client far larger than the others."""

    def chance(p: float) -> bool:
        return bool(torch.rand((), generator=generator) < p)

    def power(low: float, high: float) -> float:
        return 10.0 ** (low + (high - low) * float(torch.rand((), generator=generator)))

    clients = int(torch.randint(2, 25, (), generator=generator))
    features = int(torch.randint(1, 40, (), generator=generator))
    h = torch.randn(clients, features, generator=generator, dtype=F64)
    v = torch.rand(clients, generator=generator, dtype=F64) * power(-6, 2)
    if chance(0.3):
        centres = torch.randn(3, features, generator=generator, dtype=F64) * power(0, 4)
        h = h + centres[torch.randint(0, 3, (clients,), generator=generator)]
    if chance(0.5):
        h = h[torch.randint(0, max(1, clients // 2), (clients,), generator=generator)]
    if chance(0.4):
        v = v * (torch.rand(clients, generator=generator) < 0.5)
    if chance(0.2):
        v = v * 0
    if chance(0.3):
        h[0] *= 1e4
    scale = power(-6, 6) if chance(0.5) else 1.0
    return h * scale, v * scale**2


@pytest.mark.parametrize("seed", range(4))
def test_degenerate_programs_are_no_worse_than_daqp(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    close = []
    for _ in range(70):
        h, v = degenerate(generator)
        weights = head_weights(h, v)
        assert weights.min() >= 0
        assert kkt_residual(weights, h, v).max() <= 1e-8
        built = build_programs(h, v)  # with the floor: a variance of 0 leaves many answers
        h, v = built.h / built.unit**0.5, torch.from_numpy(built.v)
        ours = objective(h, v, weights)
        theirs = objective(h, v, torch.stack([oracle(matrix) for matrix in programs(h, v)]))
        assert bool((ours <= theirs * (1 + 1e-9)).all())
        close.append(ours >= theirs * (1 - 1e-6))
    assert torch.cat(close).double().mean() > 0.5  # else the comparison says nothing


# Errors


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_input_that_is_not_finite(bad: float) -> None:
    h, v = random_clients(0, 4)
    broken = h.clone()
    broken[1, 2] = bad
    with pytest.raises(ValueError, match="finite"):
        head_weights(broken, v)
    with pytest.raises(ValueError, match="finite"):
        head_weights(h, torch.tensor([1.0, bad, 1.0, 1.0]))


def test_input_that_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="negative"):
        head_weights(torch.ones(2, 3), torch.tensor([1.0, -1e-9]))
    with pytest.raises(ValueError, match="one variance"):
        head_weights(torch.ones(2, 3), torch.ones(3))
    with pytest.raises(ValueError, match="one variance"):
        head_weights(torch.ones(0, 3), torch.ones(0))


def test_a_wrong_answer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solver, "exchange_sets", lambda programs: np.full_like(programs.gram, 1 / len(programs.gram)))
    h, v = random_clients(0, 4)
    h[2] += 100
    torch.testing.assert_close(head_weights(h, v)[2, 2], torch.tensor(1.0, dtype=F64), rtol=0, atol=0.01)  # fixed
    monkeypatch.setattr(solver, "descend", lambda programs, weights: weights)
    with pytest.raises(SimplexError, match=r"client 2: residual \d\.\de[-+]\d+"):
        head_weights(h, v)


# One kernel for all clients


def in_one_kernel(h: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Weights, and whether they are good enough."""
    with optimistic.collected() as conditions:
        weights = optimistic_weights(h, v)
    (good,) = conditions
    return weights.cpu(), good.cpu()


@pytest.mark.parametrize(("clients", "seed"), [(1, 0), (2, 1), (6, 2), (6, 7)])
def test_one_kernel_finds_the_same(clients: int, seed: int) -> None:
    h, v = random_clients(seed, clients)
    weights, good = in_one_kernel(h, v)
    assert good
    torch.testing.assert_close(weights, head_weights(h, v), rtol=0, atol=1e-12)


@pytest.mark.parametrize("bad", [(float("nan"), 1.0), (1.0, float("inf")), (1.0, -1e-9), (1e200, 1.0)])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, which stands for a GPU
def test_one_kernel_does_not_vouch_for_nonsense(bad: tuple[float, float]) -> None:
    h, v = random_clients(0, 3)
    h[1, 2], v[0] = bad
    assert not in_one_kernel(h, v)[1]


@pytest.mark.gpu
@pytest.mark.parametrize("clients", [1, 2, 20, 32, 33, 64, 65])
@pytest.mark.parametrize("make", [label_skewed, lambda clients: random_clients(5, clients)], ids=["skewed", "random"])
def test_same_on_the_gpu(clients: int, make: Callable[[int], tuple[Tensor, Tensor]]) -> None:
    h, v = make(clients)
    expected = head_weights(h, v)
    assert head_weights(h.cuda(), v.cuda()).is_cuda
    torch.testing.assert_close(head_weights(h.cuda(), v.cuda()).cpu(), expected, rtol=0, atol=1e-10)
    with optimistic.collected() as conditions:
        hoped = head_weights(h.cuda(), v.cuda())
    assert [bool(good) for good in conditions] == [True] * (clients <= 64)
    torch.testing.assert_close(hoped.cpu(), expected, rtol=0, atol=1e-9)


@pytest.mark.gpu
def test_degenerate_programs_on_the_gpu() -> None:
    """What is vouched for is right, and it is about as much as the same search finds on a CPU."""
    generator, vouched, ours = torch.Generator().manual_seed(3), 0, 0
    for _ in range(100):
        h, v = degenerate(generator)
        weights, good = in_one_kernel(h.cuda(), v.cuda())
        near = (weights - head_weights(h, v)).abs().amax(1) <= 1e-10  # tiny weights are up to 1e-11 off
        assert not good or (near | (kkt_residual(weights, h, v) <= 1e-8)).all()
        built = build_programs(h, v)
        vouched += bool(good)
        ours += bool(residuals(built, exchange_sets(built), fresh=True).max() <= 1e-8)
    assert vouched > 0.9 * ours > 50
