"""Formulas by hand, and federations with a client that sends garbage."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from coterie.core import tree
from coterie.core.errors import CoterieError
from coterie.core.wrapper import Around
from coterie.execution import Stacked
from coterie.federation import Settings, federate
from coterie.privacy import Protection
from coterie.privacy.robust import Robust
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
    for how in ("clip", "trimmed", "median"):
        found = handed(how, [[1.0, 2.0]] * 4)
        torch.testing.assert_close(found.weights["w"], torch.tensor([[2.0, 3.0]] * 4, dtype=torch.float64))


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
     ("fedpac", "trimmed")],
)  # fmt: skip
def test_one_liar_among_eight(name: str, how: str) -> None:
    inner = toy.method(name, local_epochs=3, lr=0.1)
    guarded, honest = Protection(robust=how).around(inner, toy.model(), 8, 0), accuracy(inner)
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
