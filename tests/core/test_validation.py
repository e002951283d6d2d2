"""Settings: types and ranges that fields declare, checked wherever a dataclass is constructed, and how they print."""

from __future__ import annotations

import math
import sys
import typing
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest

import coterie
from coterie.api.methods import make_method
from coterie.cli import main
from coterie.core.errors import CoterieError
from coterie.core.training import LocalTraining
from coterie.core.validation import LIMITS, Explicit
from coterie.data.user.reading import Reading
from coterie.execution.choice import Execution
from coterie.federation import Safety, Settings
from coterie.federation.ending import Ending
from coterie.methods import METHODS, FedAvg
from coterie.privacy import Protection

TINY = ["--num-clients", "2", "--local-size", "20", "--test-size", "10", "--processes", "1", "--model", "linear"]


def numeric(kind: type) -> list[Field[Any]]:
    hints = typing.get_type_hints(kind)
    allowed = {name: typing.get_args(hint) or (hint,) for name, hint in hints.items()}
    return [f for f in fields(kind) if {int, float} & set(allowed[f.name])]


def outside(f: Field[Any]) -> list[float]:
    """Values just outside of a field's range."""
    beyond = {"low": -1, "above": 0, "high": 1, "below": 0}
    whole = "int" in str(f.type)
    values = [f.metadata[name] + step for name, step in beyond.items() if name in f.metadata]
    return values if whole else [float(value) for value in values] + [math.nan, math.inf]


FIELDS = [(name, f) for name, kind in METHODS.items() for f in numeric(kind)]


def test_settings_print_what_differs_from_the_defaults() -> None:
    assert repr(FedAvg()) == "FedAvg()"
    assert repr(Settings(rounds=200, seed=3)) == "Settings(seed=3)"
    assert repr(FedAvg(train=LocalTraining(lr=0.5))) == "FedAvg(train=LocalTraining(lr=0.5))"


@pytest.mark.parametrize(("name", "f"), FIELDS, ids=[f"{name}-{f.name}" for name, f in FIELDS])
def test_every_number_of_every_method_has_a_range(name: str, f: Field[Any]) -> None:
    assert LIMITS.keys() & f.metadata.keys(), f"{name}: {f.name} declares no range"
    METHODS[name](**{f.name: f.default})
    for value in outside(f):
        for construct in (METHODS[name], METHODS[name]().but, lambda **given: make_method(name, **given)):
            with pytest.raises(CoterieError, match=rf"^{f.name} must be .*, got {value}$"):
                construct(**{f.name: value})


@pytest.mark.long
@pytest.mark.parametrize(("name", "f"), {name: (name, f) for name, f in FIELDS}.values(), ids=dict(FIELDS))
def test_the_command_line_refuses_the_same_values(
    name: str,
    f: Field[Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as stop:
        main(["run", name, *TINY, f"--{f.name.replace('_', '-')}={outside(f)[0]}"])
    assert stop.value.code == 2
    assert f"coterie: {f.name} must be " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", [LocalTraining, Settings, Safety, Ending, Execution, Protection, Reading])
def test_settings_declare_ranges_too(kind: type) -> None:
    for f in numeric(kind):
        for value in outside(f) if f.name != "max_time" else ():  # also a text with units
            with pytest.raises(CoterieError, match=rf"^{f.name} must be .*, got {value}$"):
                kind(**{f.name: value})


@dataclass(frozen=True)
class Limited(Explicit):
    rate: float = field(default=1.0, metadata={"low": 0})
    share: float = field(default=0.5, metadata={"above": 0, "below": 1})
    chance: float | None = field(default=None, metadata={"low": 0, "high": 1})
    longest: float = field(default=1.0, metadata={"above": 0, "high": math.inf})
    free: float = -3.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rate": -2}, "rate must be at least 0, got -2"),
        ({"rate": math.inf}, "rate must be finite, got inf"),
        ({"share": 1.0}, "share must be above 0 and below 1, got 1.0"),
        ({"chance": 1.5}, "chance must be at least 0 and at most 1, got 1.5"),
        ({"chance": math.nan}, "chance must be finite, got nan"),
        ({"longest": -math.inf}, "longest must be finite, got -inf"),
        ({"rate": "fast"}, "rate must be a number, got 'fast' (str)"),
    ],
)
def test_messages(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(CoterieError) as error:
        Limited(**settings)
    assert str(error.value) == message


def test_values_at_the_limits() -> None:
    Limited(rate=0, share=1e-9, chance=None, longest=math.inf)
    Limited(0.0, chance=1, free=-math.inf)


def test_a_method_without_declared_ranges() -> None:
    @dataclass(frozen=True)
    class Plain(FedAvg):
        strength: float = 1.0

    assert Plain(strength=-2).strength == -2
    assert Plain(strength=math.inf).strength == math.inf


@pytest.mark.parametrize("train", [coterie.AdamW(), coterie.Sgd(lr=0.1), "adamw", None])
def test_an_optimizer_is_not_local_training(train: Any) -> None:
    with pytest.raises(CoterieError, match=r"train must be a coterie\.LocalTraining, got .*; an optimizer is set by"):
        coterie.FedAvg(train=train)
    with pytest.raises(CoterieError, match=r"train must be a coterie\.LocalTraining"):
        coterie.FedAvg(train)
