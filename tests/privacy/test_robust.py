"""Formulas by hand, and federations with a client that sends garbage."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

from coterie.core import tree
from coterie.core.errors import CoterieError
from coterie.core.method import Census
from coterie.core.wrapper import Around
from coterie.execution import Stacked
from coterie.federation import Settings, federate
from coterie.methods import scaffold
from coterie.privacy import Protection
from coterie.privacy.robust import ONE_FOR_ALL, WEISZFELD_STEPS, Robust, lying
from tests import toy


class Down(NamedTuple):
    weights: dict[str, Tensor]


class Up(NamedTuple):
    weights: dict[str, Tensor]
    samples: Tensor
    counts: Tensor


class Seen(Around):
    """A server that is sent one number, and remembers what it was handed."""

    def server_send(self, server: Any, client: Tensor) -> Down:
        return Down({"w": torch.tensor([1.0, 1.0], dtype=torch.float64)})

    def server_receive(self, server: Any, clients: Tensor, ups: Up) -> Up:
        return ups


def handed(how: str, rows: list[list[float]], **settings: Any) -> Up:
    """What the inner server sees of moves of these lengths from (1, 1); samples 10, 20, ..."""
    moves = torch.tensor(rows, dtype=torch.float64)
    sizes = 10.0 * torch.arange(1, len(rows) + 1).double()
    ups = Up({"w": 1 + moves}, sizes, sizes[:, None] * torch.tensor([1.0, 0.0]))
    seen = Robust(inner=Seen(inner=toy.method("fedavg")), how=how, **settings)
    return seen.server_receive((), torch.arange(len(rows)), ups)


ROWS = [[3.0, 4.0], [0.0, 1.0], [0.0, -2.0], [600.0, 800.0], [1.0, 0.0]]  # norms 5, 1, 2, 1000, 1; median 2


def test_clip_shortens_moves_to_the_median_norm() -> None:
    found = handed("clip", ROWS)
    expected = [[1.2, 1.6], [0, 1], [0, -2], [1.2, 1.6], [1, 0]]
    torch.testing.assert_close(found.weights["w"] - 1, torch.tensor(expected, dtype=torch.float64))
    assert found.samples.tolist() == [10, 20, 30, 30, 30]  # not more than the median client
    assert found.counts[:, 0].tolist() == [10, 20, 30, 30, 30]


def test_clip_to_a_given_norm() -> None:
    found = handed("clip", ROWS, norm=0.5)
    assert torch.linalg.vector_norm(found.weights["w"] - 1, dim=1).tolist() == pytest.approx([0.5] * 5)
    assert found.samples.tolist() == [10, 20, 30, 30, 30]  # which the norm is not for


def test_trimmed_pulls_one_of_five_in_from_either_end() -> None:
    found = handed("trimmed", ROWS, share=0.2)
    expected = [[3, 4], [0, 1], [0, 0], [3, 4], [1, 0]]  # of 0 0 1 3 600: 0 to 3; of -2 0 1 4 800: 0 to 4
    torch.testing.assert_close(found.weights["w"] - 1, torch.tensor(expected, dtype=torch.float64))
    assert found.samples.tolist() == [20, 20, 30, 40, 40]


@pytest.mark.parametrize("rows", [5, 4])
def test_median_takes_everybodys_place(rows: int) -> None:
    found = handed("median", ROWS[:rows])
    middle = {5: [1.0, 1.0], 4: [1.5, 2.5]}[rows]
    torch.testing.assert_close(found.weights["w"] - 1, torch.tensor([middle] * rows, dtype=torch.float64))
    assert found.samples.tolist() == [{5: 30.0, 4: 25.0}[rows]] * rows


def test_statistics_are_clipped_in_every_mode() -> None:
    assert handed("median", ROWS).counts[:, 0].tolist() == [10, 20, 30, 30, 30]


def test_negative_sizes_count_nothing() -> None:
    ups = Up({"w": torch.ones(3, 2)}, torch.tensor([-50.0, 10, 10]), torch.ones(3, 2))
    seen = Robust(inner=Seen(inner=toy.method("fedavg")), how="clip")
    assert seen.server_receive((), torch.arange(3), ups).samples.tolist() == [0, 10, 10]


def test_clients_that_agree_are_left_as_they_are() -> None:
    """Nothing is changed where there is nothing to be changed: all move alike."""
    for how in ("clip", "trimmed", "median", *ONE_FOR_ALL):
        found = handed(how, [[1.0, 2.0]] * 15)
        torch.testing.assert_close(found.weights["w"], torch.tensor([[2.0, 3.0]] * 15, dtype=torch.float64))


# Plain implementations, from the definitions: rows of numpy, sorted lists, one client after the other.


def plain_scores(rows: np.ndarray, among: list[int], liars: int) -> dict[int, float]:
    """Krum: the sum of the squared distances to the nearest ones, as many as there are honest others."""
    found = {}
    for i in among:
        away = sorted(float(((rows[i] - rows[j]) ** 2).sum()) for j in among if j != i)
        found[i] = sum(away[: max(len(among) - liars - 2, 1)])
    return found


def plain_krum(rows: np.ndarray, samples: np.ndarray, liars: int) -> np.ndarray:
    found = plain_scores(rows, list(range(len(rows))), liars)
    return rows[min(found, key=lambda i: found[i])]


def plain_multi_krum(rows: np.ndarray, samples: np.ndarray, liars: int) -> np.ndarray:
    found = plain_scores(rows, list(range(len(rows))), liars)
    return rows[sorted(found, key=lambda i: found[i])[: len(rows) - liars]].mean(0)


def plain_bulyan(rows: np.ndarray, samples: np.ndarray, liars: int) -> np.ndarray:
    left, chosen = list(range(len(rows))), []
    while len(chosen) < len(rows) - 2 * liars:
        found = plain_scores(rows, left, liars)
        chosen.append(min(found, key=lambda i: found[i]))
        left.remove(chosen[-1])
    out = []
    for column in rows[chosen].T:
        middle = np.median(column)
        out.append(np.mean(sorted(column, key=lambda v: abs(v - middle))[: len(rows) - 4 * liars]))
    return np.array(out)


def plain_geometric_median(rows: np.ndarray, samples: np.ndarray, liars: int) -> np.ndarray:
    weights, point = np.minimum(samples, np.median(samples)), np.zeros(rows.shape[1])
    for _ in range(WEISZFELD_STEPS):
        pull = weights / np.maximum(np.linalg.norm(rows - point, axis=1), 1e-6)
        point = (pull[:, None] * rows).sum(0) / pull.sum()
    return point


PLAIN = {
    "krum": plain_krum,
    "multi-krum": plain_multi_krum,
    "bulyan": plain_bulyan,
    "geometric-median": plain_geometric_median,
}


@pytest.mark.parametrize("how", PLAIN)
@pytest.mark.parametrize(("clients", "share", "liars"), [(11, 0.1, 2), (12, 0.08, 1), (19, 0.2, 4)])
def test_one_for_all_equals_the_plain_implementation(how: str, clients: int, share: float, liars: int) -> None:
    """Two tensors of unlike shape and one liar among normal rows; every client gets the same row."""
    draw = np.random.default_rng(clients)
    rows = draw.normal(size=(clients, 7))
    rows[2] *= 1000
    sizes = torch.tensor(draw.integers(5, 50, clients)).double()
    moves = torch.tensor(rows)
    ups = Up({"v": 3 + moves[:, :1], "w": 1 + moves[:, 1:].reshape(clients, 3, 2)}, sizes, torch.ones(clients, 2))
    robust = Robust(inner=Sent(inner=toy.method("fedavg")), how=how, share=share)
    found = robust.server_receive((), torch.arange(clients), ups)
    flat = torch.cat([found.weights["v"] - 3, found.weights["w"].flatten(1) - 1], 1).numpy()
    expected = PLAIN[how](rows, sizes.numpy(), liars)
    np.testing.assert_allclose(flat, np.tile(expected, (clients, 1)), atol=1e-10)
    assert found.samples.tolist() == [float(sizes.quantile(0.5))] * clients
    assert np.abs(expected).max() < 5


class Sent(Around):
    def server_send(self, server: Any, client: Tensor) -> Down:
        return Down({"v": torch.full((1,), 3.0).double(), "w": torch.ones(3, 2).double()})

    def server_receive(self, server: Any, clients: Tensor, ups: Up) -> Up:
        return ups


def test_the_geometric_median_is_where_the_sum_of_distances_is_least() -> None:
    rows = np.random.default_rng(0).normal(size=(9, 2))
    found = handed("geometric-median", rows.tolist())
    weights = np.minimum(np.arange(10, 100, 10), 50)
    best = minimize(lambda v: float((weights * np.linalg.norm(rows - v, axis=1)).sum()), np.zeros(2), tol=1e-10)
    np.testing.assert_allclose(found.weights["w"][0].numpy() - 1, best.x, atol=1e-4)


def test_krum_by_hand() -> None:
    """Five on a line at 0, 1, 2, 10 and 11, one may lie: two neighbors count, and 1 has the nearest ones."""
    rows = [[0.0, 0.0], [1.0, 0.0], [2.0, 0.0], [10.0, 0.0], [11.0, 0.0]]
    assert (handed("krum", rows).weights["w"] - 1).tolist() == [[1.0, 0.0]] * 5
    mean = handed("multi-krum", rows).weights["w"][0, 0] - 1  # scores 5, 2, 5, 65, 82: without the last
    assert float(mean) == pytest.approx((0 + 1 + 2 + 10) / 4)


@pytest.mark.parametrize(("how", "enough"), [("krum", 5), ("multi-krum", 5), ("bulyan", 7)])
def test_too_few_clients_are_refused_in_one_line(how: str, enough: int) -> None:
    fedavg, protection = toy.method("fedavg"), Protection(robust=how, robust_share=0.14)  # f = 1 of at most 7
    protection.around(fedavg, toy.model(), enough, 0)
    with pytest.raises(
        CoterieError, match=rf"^--robust {how} needs at least .f \+ 3 clients .* needs {enough};[^\n]*$"
    ):
        protection.around(fedavg, toy.model(), enough - 1, 0)
    with pytest.raises(CoterieError, match="needs at least"):  # as if others had not answered
        handed(how, ROWS[: enough - 1] + ROWS[: max(enough - 6, 0)], share=0.14)


def test_two_fields_are_judged_together() -> None:
    """The client with the most central weights lies in its controls, so it is not chosen."""
    method, model = toy.method("scaffold"), toy.model()
    server = method.server_init(model, Census(torch.full((5,), 9), torch.ones(5, 4, dtype=torch.int64)))
    away = torch.tensor([0.0, 1.0, -1.0, 2.0, -2.0]).double()
    weights = tree.apply(lambda t: t + away.view(-1, *[1] * t.ndim), model.start)
    controls = tree.apply(lambda t: torch.zeros(5, *t.shape, dtype=t.dtype), tree.trained(model.start))
    guarded = Robust(inner=method, how="krum")
    honest = guarded.server_receive(server, torch.arange(5), scaffold.Up(weights, controls))
    torch.testing.assert_close(honest.weights.head["bias"], model.start.head["bias"])
    for t in controls.values():
        t[0] = 1e3
    found = guarded.server_receive(server, torch.arange(5), scaffold.Up(weights, controls))
    assert not any(t.any() for t in found.control.values())
    assert float((found.weights.head["bias"] - model.start.head["bias"]).abs().max()) == pytest.approx(1.0)


@dataclass(frozen=True)
class Poisoned(Around):
    """One client sends something else than it trained."""

    garbage: str = field(kw_only=True)

    def server_receive(self, server: Any, clients: Tensor, ups: Any) -> Any:
        def spoil(t: Tensor) -> Tensor:
            if not t.is_floating_point():
                return t
            draw = torch.Generator().manual_seed(t.numel())
            bad = {
                "huge": lambda: torch.full_like(t[0], 1e6),
                "flipped": lambda: -20 * t[0],
                "random": lambda: 100 * torch.randn(t[0].shape, generator=draw).to(t),
            }[self.garbage]()
            return torch.cat([bad[None], t[1:]])

        assert clients[0] == 0
        return self.inner.server_receive(server, clients, tree.apply(spoil, ups))


def accuracy(method: Any) -> float:
    """Of the honest clients, in percent; 0 if training breaks down."""
    data = toy.toy(train=(24,) * 8, test=(40,) * 8, augmented=False)
    clients = Stacked(method, toy.model(torch.float32), data, 0)
    try:
        _, history = federate(clients, Settings(rounds=5, evaluate_every=5))
    except (CoterieError, ValueError):  # FedPAC refuses a negative variance
        return 0.0
    scores = history[4].scores["pre", "test"]
    return 100 * float(scores.weighted[1:].sum() / scores.total[1:].sum())


@pytest.mark.parametrize(
    ("name", "how"),
    [("fedavg", "clip"), ("fedavg", "trimmed"), ("fedavg", "median"), ("scaffold", "trimmed"), ("fedpac", "clip"),
     ("fedpac", "trimmed"), ("fedavg", "krum"), ("fedavg", "multi-krum"), ("fedavg", "bulyan"),
     ("fedavg", "geometric-median"), ("ditto", "multi-krum")],
)  # fmt: skip
def test_one_liar_among_eight(name: str, how: str) -> None:
    inner = toy.method(name, local_epochs=3, lr=0.1)
    guarded, honest = Protection(robust=how, robust_share=0.12).around(inner, toy.model(), 8, 0), accuracy(inner)
    assert honest > 90
    for garbage in ("huge", "flipped", "random"):
        assert accuracy(Poisoned(inner=guarded, garbage=garbage)) > honest - 10, garbage
        assert accuracy(Poisoned(inner=inner, garbage=garbage)) < 60, garbage


def test_settings_that_make_no_sense() -> None:
    for wrong in (
        {"robust": "mean"}, {"robust_share": 0.5}, {"robust_norm": 0.0}, {"dp": "round"}, {"dp_noise": 0.0},
        {"dp_clip": -1.0}, {"dp_delta": 1.0}, {"dp_statistics": float("inf")}, {"robust": "clip", "dp": "client"},
    ):  # fmt: skip
        with pytest.raises(CoterieError):
            Protection(**wrong)


@pytest.mark.parametrize(
    ("share", "clients", "expected"), [(0.28, 25, 7), (0.14, 50, 7), (0.07, 100, 7), (0.2, 11, 3), (0.0, 9, 0)]
)
def test_a_share_of_clients_is_rounded_up_once(share: float, clients: int, expected: int) -> None:
    """In floating point, 0.28 of 25 is a little more than 7. Trimmed replaces as many values at either end."""
    assert lying("geometric-median", share, clients) == expected
    values = torch.arange(float(clients), dtype=torch.float64)[:, None]
    trimmed = Robust(inner=toy.method("fedavg"), how="trimmed", share=share).pulled(values).flatten()
    assert trimmed.tolist() == [min(max(v, expected), clients - 1 - expected) for v in range(clients)]
