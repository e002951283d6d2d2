"""Settings to search: what is typed, what is drawn, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from coterie.api.variations import shown
from coterie.core.errors import CoterieError
from coterie.methods.ditto import Ditto
from coterie.methods.fedpac import FedPAC
from coterie.tuning.space import Span, candidates, check_search, draws, read_space


def space(**over: Any) -> dict[str, Any]:
    return read_space("FedPAC", FedPAC, over)


def test_values_have_the_type_of_the_setting() -> None:
    found = space(align="0.1,1,10", combine="true,off", head_epochs="1, 2", join_ratio=[1, np.float64(0.5)])
    assert found == {"align": [0.1, 1.0, 10.0], "combine": [True, False], "head_epochs": [1, 2], "join_ratio": [1, 0.5]}
    assert [type(v) for values in found.values() for v in values] == [float] * 3 + [bool] * 2 + [int] * 2 + [float] * 2
    assert space(lr="0.1,0.10,1e-1") == {"lr": [0.1]}


def test_a_setting_may_be_called_as_its_flag() -> None:
    assert space(**{"local-epochs": "1,2", "batch_size": [10], "schedule": "cosine,exponential:0.9"}) == {
        "local_epochs": [1, 2], "batch_size": [10], "schedule": ["cosine", "exponential:0.9"],
    }  # fmt: skip


def test_a_setting_that_may_be_missing() -> None:
    name = next(f.name for f in Ditto.__dataclass_fields__.values() if f.default is None)
    assert read_space("Ditto", Ditto, {name: "none,3"}) == {name: [None, 3]}


def test_grid() -> None:
    found = candidates(space(align="0.1,1", combine="true,false"), "grid", None, 0)
    assert [shown(c) for c in found] == [
        "align=0.1 combine=true", "align=0.1 combine=false", "align=1.0 combine=true", "align=1.0 combine=false",
    ]  # fmt: skip


def test_ranges() -> None:
    """Both ends, and halves where the geometric mean, or the mean, divides them."""
    lr, epochs = Span(0.001, 0.1, whole=False), Span(1, 10, whole=True)
    assert (lr.draw(0.0), lr.draw(0.5), lr.draw(1 - 1e-12)) == (0.001, 0.01, 0.1)
    assert [epochs.draw(k / 10) for k in range(10)] == list(range(1, 11))
    assert epochs.draw(1 - 1e-12) == 10
    assert space(lr="0.001..0.1", local_epochs="1..10") == {"lr": lr, "local_epochs": epochs}


def test_random() -> None:
    made = space(lr="0.001..0.1", local_epochs="1..10", combine="true,false")
    found = draws(made, 2000, 3)
    assert found == draws(made, 2000, 3)
    assert found != draws(made, 2000, 4)
    assert len({shown(c) for c in found}) == 2000
    logs = sorted(math.log10(c["lr"]) for c in found)
    expected = [-3 + 2 * k / 2000 for k in range(2000)]
    assert max(abs(a - b) for a, b in zip(logs, expected, strict=True)) / 2 < 1.63 / 2000**0.5  # Kolmogorov, 1 %
    counts = [sum(c["local_epochs"] == e for c in found) for e in range(1, 11)]
    assert sum((n - 200) ** 2 / 200 for n in counts) < 21.67  # chi-squared, 9 degrees of freedom, 1 %
    assert all(float(str(c["lr"])) == float(f"{c['lr']:.4g}") == c["lr"] for c in found)


def test_random_ends_when_there_is_nothing_new() -> None:
    found = candidates(space(local_epochs="1..2", combine="true,false"), "random", 50, 0)
    assert sorted(shown(c) for c in found) == [
        "local_epochs=1 combine=false", "local_epochs=1 combine=true",
        "local_epochs=2 combine=false", "local_epochs=2 combine=true",
    ]  # fmt: skip


def test_halving_takes_a_grid_or_draws() -> None:
    assert len(candidates(space(lr="0.1,0.2,0.3"), "halving", None, 0)) == 3
    assert len(candidates(space(lr="0.1,0.2,0.3"), "halving", 2, 0)) == 2
    assert len(candidates(space(lr="0.1..0.3"), "halving", None, 0)) == 16


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ({}, "nothing to search"),
        ({"algin": "1"}, "unknown setting of FedPAC 'algin': did you mean 'align'"),
        ({"train": "1"}, "unknown setting"),
        ({"rounds": "1,2"}, "rounds cannot be searched"),
        ({"seed": "1,2"}, "the best seed is luck"),
        ({"lr": "fast"}, "lr must be a finite number, got 'fast'"),
        ({"lr": "nan"}, "lr must be a finite number, got nan"),
        ({"lr": [True]}, "lr must be a finite number, got True"),
        ({"lr": []}, "lr: expected a list of values"),
        ({"lr": 0.1}, "lr: expected a list of values, got 0.1"),
        ({"lr": "0.1,,1"}, "a value is missing"),
        ({"local_epochs": "1.5"}, "local_epochs must be a whole number, got '1.5'"),
        ({"local_epochs": [1.0]}, "local_epochs must be a whole number, got 1.0"),
        ({"local_epochs": "1,2", "local-epochs": "3"}, "local_epochs is named twice"),
        ({"combine": "perhaps"}, "combine must be true or false, got 'perhaps'"),
        ({"combine": [1]}, "combine must be true or false, got 1"),
        ({"lr": "1..0.1"}, "must be the smaller one"),
        ({"lr": "0..0.1"}, "must start above 0"),
        ({"lr": "0.1..x"}, "lr must be a finite number, got 'x'"),
        ({"combine": "true..false"}, "only numbers have a range"),
    ],
)
def test_what_is_refused(over: dict[str, Any], said: str) -> None:
    with pytest.raises(CoterieError) as refused:
        space(**over)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("search", "trials", "said"),
    [
        ("gird", None, "unknown search 'gird': did you mean 'grid'"),
        ("grid", None, "lr is a range; list its values"),
        ("random", 0, "trials must be at least 1, got 0"),
    ],
)
def test_what_does_not_fit_the_search(search: str, trials: int | None, said: str) -> None:
    def draw() -> None:
        check_search(search, trials)
        candidates(space(lr="0.1..1"), search, trials, 0)

    with pytest.raises(CoterieError) as refused:
        draw()
    assert said in str(refused.value)
    with pytest.raises(CoterieError, match="a grid tries all combinations"):
        candidates(space(lr="0.1,1"), "grid", 3, 0)
