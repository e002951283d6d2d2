"""Names of classes, clients and columns with control and bidirectional characters: no command prints them raw."""

from __future__ import annotations

import contextlib
import csv
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from coterie.cli import main
from coterie.core.printable import printable

CLASSES = ("nor\u202emal\x1b[31mRED", "b\x07el\nline\u2066\U000e0041")
CLIENTS = ("cli\x1b]0;pwn\x07ent\u202e", "two\u200f\x9b31m\x7f", "th\rree\ncoterie: all is well")
COLUMNS = ("a\u202eb", "b\x1b[2J")
Command = Callable[..., str]


def write(path: Path, client: bool) -> None:
    draw = random.Random(0)
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow([*COLUMNS, "y", *(["client"] if client else [])])
        for i in range(60):
            values = [draw.gauss(i % 2, 1), draw.gauss(-(i % 2), 1), CLASSES[i % 2]]
            table.writerow([*values, *([CLIENTS[i % 3]] if client else [])])


@pytest.fixture
def say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """What a command prints, on both streams; checked to be visible text only."""
    monkeypatch.chdir(tmp_path)
    write(Path("d.csv"), client=True)
    write(Path("new.csv"), client=False)

    def said(*arguments: str) -> str:
        capfd.readouterr()
        with contextlib.suppress(SystemExit):
            main(list(arguments))
        out = "".join(capfd.readouterr())
        assert out.replace("\n", "").isprintable(), (arguments, out)
        return out

    return said


def test_no_command_prints_names_as_they_are(say: Command, tmp_path: Path) -> None:
    assert r"nor\u202emal\u001b[31mRED 30" in say("data", "check", "d.csv")
    say("run", "fedpac", "--dataset", "d.csv", "--rounds", "1", "--model", "mlp", "--out", "r", "--processes", "1")
    say("models", "r")
    for command in (
        ("predict", "r", "--client", "0", "new.csv"),
        ("evaluate", "r"),
        ("evaluate", "r", "--data", "new.csv"),
    ):
        found = say(*command)
        assert r"nor\u202e" in found
        say(*command, "--json")
    found = say("predict", "r", "--client", "0", "new.csv", "--json")
    assert {c["name"] for c in json.loads(found)[0]["classes"]} == set(CLASSES)
    wrong = say("predict", "r", "--client", "nobody", "new.csv")
    assert wrong.count("\n") == 1  # a name cannot add a line of its own
    assert r"th\rree\ncoterie: all is well" in wrong
    assert r"expected: a\u202eb, b\u001b[2J" in say("predict", "r", "--client", "0", "d.csv")
    say("adapt", "r", "--data", "new.csv", "--out", "adapted")
    say("report", "r", "--out", "r.html")
    say("pictures", "--dataset", "d.csv", "--out", "pictures")
    shown = [tmp_path / "r.html", tmp_path / "r" / "log.txt", *tmp_path.rglob("*.svg")]
    assert len(shown) >= 5
    for path in shown:
        text = path.read_text(encoding="utf-8").replace("\n", "")
        assert text.isprintable(), path


def test_escapes_are_those_of_json() -> None:
    for letter in [*map(chr, range(0x250)), *"\u202e\u2066\u200f\ufeff\U000e0041\udcff日λ"]:
        shown = printable(letter)
        assert shown.isprintable()
        assert shown == letter if letter.isprintable() else json.loads(f'"{shown}"') == letter
