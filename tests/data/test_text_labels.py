"""Labels that are text: classes, or numbers and identifiers that are refused by row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import coterie
from coterie.core.errors import CoterieError

ROWS = 60
DRAWS = np.random.default_rng(0)
HOURS = DRAWS.normal(5, 2, ROWS).round(2)
SCORES = (3 * HOURS + DRAWS.normal(size=ROWS)).round(2)


def table(tmp_path: Path, labels: list[str], hours: list[str] | None = None) -> Path:
    path = tmp_path / "clinic.csv"
    rows = zip(hours or [f"{h:.2f}" for h in HOURS], labels, strict=True)
    path.write_text("hours;site;y\n" + "".join(f"{h};s{i % 2};{label}\n" for i, (h, label) in enumerate(rows)))
    return path


def goal(path: Path, **options: str) -> str:
    return coterie.load_clients(str(path), label_column="y", client_column="site", **options).task.described()


def binary(cell: str) -> list[str]:
    return [cell if i == 7 else str(i % 2) for i in range(ROWS)]


@pytest.mark.parametrize("cell", ["n.a.", "#N/A", "-", "NA", ""])
def test_a_missing_label_is_refused_with_its_row(tmp_path: Path, cell: str) -> None:
    with pytest.raises(CoterieError, match=r"no label.*line 9"):
        goal(table(tmp_path, binary(cell)))
    with pytest.raises(CoterieError, match=r"missing.*line 9"):
        goal(table(tmp_path, [cell if i == 7 else f"{s:.2f}" for i, s in enumerate(SCORES)]))


@pytest.mark.parametrize("cell", ["5,3", "<0.5", "x"])
def test_text_among_numbers_is_refused_with_its_row(tmp_path: Path, cell: str) -> None:
    with pytest.raises(CoterieError, match=f"line 9: the label '{cell}'"):
        goal(table(tmp_path, binary(cell)))
    with pytest.raises(CoterieError, match=f"line 9: the label '{cell}'"):
        goal(table(tmp_path, [cell if i == 7 else f"{s:.2f}" for i, s in enumerate(SCORES)]))


@pytest.mark.parametrize("form", ["{:.2f}%", "{:.2f} kg", "{:,.1f}", "{:.0f} mm", "id{}"])
def test_amounts_and_identifiers_in_text_are_not_classes(tmp_path: Path, form: str) -> None:
    labels = [form.format(1000 * s) for s in SCORES]
    with pytest.raises(CoterieError, match=r"line 2: the label.*--task classification"):
        goal(table(tmp_path, labels))
    assert goal(table(tmp_path, labels), task="classification").startswith("classification")


def test_fractions_of_any_size_are_a_regression(tmp_path: Path) -> None:
    assert goal(table(tmp_path, [f"{1000 * s + 0.5}" for s in SCORES])).startswith("regression")


def test_decimal_commas_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CoterieError, match="decimal comma"):
        goal(table(tmp_path, [f"{s:.2f}".replace(".", ",") for s in SCORES]))


@pytest.mark.parametrize("names", ["+ -", "low mid high", "0-10 10-20 20-30 30-40 40-50 50-60 60-70", "1st 2nd 3rd"])
def test_words_are_classes(tmp_path: Path, names: str) -> None:
    words = names.split()
    labels = [words[i % len(words)] for i in range(ROWS)]
    assert goal(table(tmp_path, labels)) == f"classification, {len(words)} classes"


def test_a_dash_is_a_missing_number_and_a_category_among_words(tmp_path: Path) -> None:
    cells = ["-" if i == 3 else f"{h:.2f}" for i, h in enumerate(HOURS)]
    with pytest.raises(CoterieError, match=r"missing values.*line 5"):
        goal(table(tmp_path, binary("0"), cells))
    rhesus = coterie.load_clients(
        str(table(tmp_path, binary("0"), ["+", "-"] * (ROWS // 2))), label_column="y", client_column="site"
    )
    assert rhesus.transform.columns[0].categories == ("+", "-")


def findings(tmp_path: Path, words: list[str]) -> Path:
    """p holds 0 and 1, q the words; the feature is the number of the row."""
    path = tmp_path / "findings.csv"
    rows = "".join(f"{i}.5;s{i % 2};{i % 2};{word}\n" for i, word in enumerate(words))
    path.write_text("row;site;p;q\n" + rows)
    return path


@pytest.mark.parametrize(("yes", "no"), [("yes", "no"), ("Y", "n"), ("TRUE", "False"), (" Yes ", "0")])
def test_several_label_columns_take_yes_and_no(tmp_path: Path, yes: str, no: str) -> None:
    answers = [i % 3 > 0 for i in range(ROWS)]
    path = findings(tmp_path, [yes if answer else no for answer in answers])
    made = coterie.load_clients(str(path), label_column="p,q", client_column="site")
    assert made.task.name == "multi-label"
    for split in (made.train, made.test):
        assert split.y[:, 1].bool().tolist() == [answers[int(row)] for row in split.x[:, 0].tolist()]


def test_booleans_and_yes_in_a_table_in_memory() -> None:
    frame = pd.DataFrame({"hours": HOURS, "site": ["a", "b"] * (ROWS // 2), "p": HOURS > 5})
    frame["q"] = np.where(HOURS > 6, "yes", "no")
    made = coterie.clients_from(frame, client="site", label_column="p,q")
    assert torch.equal(made.train.y, torch.cat([made.train.x > 5, made.train.x > 6], 1).to(made.train.y.dtype))


@pytest.mark.parametrize("word", ["maybe", "ja", "2"])
def test_other_words_in_several_label_columns_are_refused_by_row(tmp_path: Path, word: str) -> None:
    path = findings(tmp_path, ["yes", "no", word] * (ROWS // 3))
    with pytest.raises(CoterieError, match=rf"line 4: label column 'q' holds text \('{word}'\).* write 1 for yes"):
        coterie.load_clients(str(path), label_column="p,q", client_column="site")


def test_a_missing_answer_in_several_label_columns_is_refused(tmp_path: Path) -> None:
    path = findings(tmp_path, ["yes", "no", ""] * (ROWS // 3))
    with pytest.raises(CoterieError, match=r"missing.*line 4"):
        coterie.load_clients(str(path), label_column="p,q", client_column="site")


def test_columns_of_unknown_labels_are_not_guessed() -> None:
    x, y = DRAWS.normal(size=(ROWS, 3)), DRAWS.integers(-1, 2, (ROWS, 4))
    with pytest.raises(CoterieError, match="label columns hold -1, 0 and 1; name the task"):
        coterie.clients_from([(x, y), (x, y)])
    assert coterie.clients_from([(x, y), (x, y)], task="regression").task.name == "regression"
    assert coterie.clients_from([(x, y + 1), (x, y + 1)]).task.name == "regression"


def test_numbers_as_text_in_memory() -> None:
    clients = {name: pd.DataFrame({"a": HOURS, "y": [f"{s:.2f}" for s in SCORES]}) for name in ("north", "south")}
    with pytest.raises(CoterieError, match="number written as text"):
        coterie.clients_from(clients, label_column="y")
    as_text = {name: one.assign(a=one.a.astype(str), y=SCORES) for name, one in clients.items()}
    with pytest.raises(CoterieError, match=r"text in a column of numbers.*column 'a'"):
        coterie.clients_from(as_text, label_column="y")
    typo = {name: one.assign(y=[*SCORES[:3], "x", *SCORES[4:]]) for name, one in clients.items()}
    with pytest.raises(CoterieError, match="client north, row 3: the label 'x' is text among numbers"):
        coterie.clients_from(typo, label_column="y")
    text = {name: one.assign(y=[*map(str, SCORES[:3]), "x", *map(str, SCORES[4:])]) for name, one in clients.items()}
    with pytest.raises(CoterieError, match="row 3: the label 'x' is text; regression needs numbers"):
        coterie.clients_from(text, label_column="y", task="regression")
    lost = {name: one.assign(y=["yes", "nan"] * (ROWS // 2)) for name, one in clients.items()}
    with pytest.raises(CoterieError, match="no label: client north, row 1"):
        coterie.clients_from(lost, label_column="y")
