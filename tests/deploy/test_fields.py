"""Every field that a device sends has a declared protection, listed in the docs and by `coterie privacy`."""

from __future__ import annotations

import json
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from coterie.cli import main
from coterie.core.errors import CoterieError
from coterie.deploy import fields
from coterie.deploy.fields import (
    CATEGORIES,
    COMPUTED,
    MODES,
    SIZE,
    STATISTICS,
    WEIGHTS,
    Mode,
    leaves,
    markdown,
    rows,
    sent,
)
from coterie.deploy.handshake import Hello, hello, to_json
from coterie.deploy.wire import Header
from coterie.methods import METHODS
from coterie.privacy import Protection, updates
from tests import direct, toy

PAGE = (Path(__file__).parents[2] / "docs" / "privacy.md").read_text(encoding="utf-8")


class Pair(NamedTuple):
    left: int
    right: int


@dataclass(frozen=True)
class Inner:
    pair: Pair | None
    names: tuple[str, ...]


def test_every_field_has_a_category_and_every_category_a_field() -> None:
    assert set(sent()) == CATEGORIES.keys()


def test_the_fields_are_those_that_travel() -> None:
    """Against the bytes: keys of the JSON of a hello, names of the tensors of answers, entries of the header."""

    def keys(told: object, path: str) -> set[str]:
        if isinstance(told, dict):
            return set().union(*(keys(value, f"{path}.{name}") for name, value in told.items()))
        if isinstance(told, list) and told and isinstance(told[0], dict):
            return keys(told[0], path)
        return {path}

    said = keys(json.loads(to_json(hello("a", toy.toy(), (0, 1, 2, 3, 4)))), "hello")
    free = ("hello.schema.transform.columns", "hello.schema.transform.inputs", "hello.schema.task.options.")
    assert {path for path in said if not path.startswith(free)} <= set(sent())
    for name in METHODS:
        method = toy.method(name)
        agreement = direct.agreement(method, toy.model(torch.float32), toy.toy())
        travel = {".".join(entry[0].split(".")[:2]) for entry in agreement.up.entries}
        assert travel <= set(sent(method)), name
        assert all(shape == (3,) for _, _, shape in agreement.scores.entries), name  # correct, total, loss
    assert {f"answer.{name}" for name in Header._fields} <= set(sent())


def test_a_new_field_without_a_protection_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    wider = make_dataclass("Wider", [("postcode", str)], bases=(Hello,), frozen=True, kw_only=True)
    monkeypatch.setattr(fields, "Hello", wider)
    with pytest.raises(CoterieError, match=r"undeclared protection of field hello\.postcode"):
        markdown()


def test_nested_types_are_walked_to_the_end() -> None:
    Outer = make_dataclass("Outer", [("rows", tuple[Inner, ...]), ("one", int)])
    assert list(leaves(Outer, "o")) == ["o.rows.pair.left", "o.rows.pair.right", "o.rows.names", "o.one"]


def test_categories_agree_with_the_mechanisms() -> None:
    """Noise is added to statistics by name, sizes are blanked by name: the table must mean the same fields."""
    named = {kind: {f.removeprefix("up.") for f, k in CATEGORIES.items() if f.startswith("up.") and k == kind}
             for kind in (SIZE, STATISTICS, WEIGHTS, COMPUTED)}  # fmt: skip
    assert named[SIZE] == updates.SIZES
    assert named[STATISTICS] == updates.STATISTICS
    for name in METHODS:
        method = toy.method(name)
        mine = {f.removeprefix("up.") for f in sent(method) if f.startswith("up.")}
        for kind, protection in (
            (STATISTICS, Protection(dp="sample")),
            (COMPUTED, Protection(dp="sample")),
            (STATISTICS, Protection(dp="client")),
            (COMPUTED, Protection(dp="client")),
        ):
            if mine & named[kind] and name != "gpfl":  # whose condition travels only if heads are averaged
                with pytest.raises(CoterieError, match="does not support"):
                    rows(method, Mode(protection))


def test_the_page_has_the_table() -> None:
    assert f"<!-- fields -->\n{markdown()}<!-- end of fields -->" in PAGE, "run `coterie privacy --markdown`"
    assert "The noise of a simulation gives no privacy" in PAGE


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    main(["privacy", "fedavg", "--dp", "sample"])
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    told = {field.strip(): what.strip() for field, what in lines.items()}
    assert told["up.weights"] == "noise in every step, counted"
    assert told["up.samples"] == "exact, not covered"
    assert told["scores.weighted"].startswith("not sent")
    assert "up.prototypes" not in told
    with pytest.raises(SystemExit):
        main(["privacy", "fedpac", "--dp", "sample"])
    assert "FedPAC does not support --dp sample" in capsys.readouterr().err
    main(["privacy", "fedpac", "--dp", "sample", "--dp-statistics", "2", "--align", "0", "--json"])
    found = {row["field"]: row["protected"] for row in json.loads(capsys.readouterr().out)}
    assert found["up.prototypes"] == "noise, counted"
    main(["privacy", "--markdown"])
    assert capsys.readouterr().out == markdown()


def test_nothing_private_is_called_exact_without_saying_so() -> None:
    """In a mode with noise, every field is protected, refused, not sent, free of samples, or named as not covered."""
    mode = MODES["`--dp sample`"]
    for field in sent():
        assert fields.protected(CATEGORIES[field], mode) != "exact", field


def test_a_run_says_what_it_does_not_cover(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ["--num-clients", "3", "--local-size", "30", "--test-size", "12", "--rounds", "1", "--model", "linear"]
    main(["run", "fedavg", *tiny, "--dp", "sample", "--processes", "1", "--out", str(tmp_path / "run")])
    line = capsys.readouterr().out
    for told in (json.loads((tmp_path / "run" / name).read_text()) for name in ("config.json", "result.json")):
        privacy = told.get("privacy") or told["protection"]["privacy"]
        assert privacy["covers"] == "the weights that a client sends, and its personal model"
        assert "numbers of samples" in privacy["not_covered"]
        assert any("test samples" in missing for missing in privacy["not_covered"])
        assert "gives no privacy" in privacy["noise"]
    words = " ".join(line.split())
    assert "does not cover: numbers of samples" in words
    assert "it gives no privacy" in words
