"""Tables in their forms, read back."""

from __future__ import annotations

import csv
import io

import pytest

from coterie.comparison import comparison, paired_tests
from coterie.core.errors import CoterieError
from coterie.display import widths
from coterie.tables import Table, as_csv, latex, markdown, show

TABLE = Table("A & B", ["method", "95 %"], [["Fed_PAC", "81.1 ± 0.2"], ['a|b, "c"', "-"]], "See #1.")


def test_csv_is_read_back() -> None:
    assert list(csv.reader(io.StringIO(as_csv(TABLE)))) == [list(TABLE.header), *map(list, TABLE.rows)]


def test_markdown_keeps_its_columns() -> None:
    lines = [line for line in markdown(TABLE).splitlines() if line.startswith("|")]
    assert len(lines) == 4
    assert all(line.replace("\\|", "").count("|") == 3 for line in lines)


def test_latex_escapes() -> None:
    text = latex(TABLE)
    assert r"\caption{A \& B}" in text
    assert r"Fed\_PAC & 81.1 $\pm$ 0.2 \\" in text
    assert r"95 \%" in text
    assert r"See \#1." in text
    assert text.count("{") == text.count("}")
    assert r"$\varepsilon$ & " in latex(Table("t", ["ε", "a"], []))  # the privacy column; pdfLaTeX knows no ε


def test_a_form_that_does_not_exist() -> None:
    with pytest.raises(CoterieError, match="did you mean 'latex'"):
        show([TABLE], "latx")


def outcomes(means: dict[str, list[list[float]]]) -> dict[str, object]:
    """Method -> for each seed, accuracies of the clients."""
    rows = [
        {"method": name, "seed": seed, "mean": sum(own) / len(own), "megabytes": 1.0, "clients": [*range(len(own))],
         "accuracies": own}
        for name, seeds in means.items()
        for seed, own in enumerate(seeds)
    ]  # fmt: skip
    return {"data": "toy", "clients": 3, "outcomes": rows}


def test_comparison_by_hand() -> None:
    better = [[0.5, 0.6, 0.7], [0.6, 0.7, 0.8]]
    worse = [[0.4, 0.45, 0.5], [0.35, 0.4, 0.45]]
    accuracies, tests = comparison(outcomes({"Low": worse, "High": better}), seeds=2)
    assert accuracies.header[:3] == ["method", "accuracy", "95 %"]
    assert accuracies.rows[1][:3] == ["High", "65.00 ± 7.07", "±63.53"]  # 12.706 * 7.0711 / √2
    ((name, difference, pairs, p, corrected, verdict),) = tests.rows
    assert (name, difference, pairs) == ("Low", "-22.50", "6")
    assert float(p) == float(corrected) == pytest.approx(2 / 2**6, abs=5e-4)  # all six of one sign, no ties
    assert verdict == "worse"
    assert "Holm" in tests.note
    assert "Wilcoxon" in tests.note


def test_only_what_both_have_is_paired() -> None:
    samples = {"A": {(0, 0): 0.5, (0, 1): 0.5}, "B": {(0, 1): 0.4, (1, 1): 0.9}, "C": {(7, 7): 1.0}}
    table = paired_tests(samples, "A", "t")
    assert [row[:3] for row in table.rows] == [["B", "-10.00", "1"]]
    with pytest.raises(CoterieError, match="test against"):
        paired_tests(samples, "D", "t")


def test_better_or_worse_is_by_ranks() -> None:
    """Two clients that gain much lift the mean; eighteen of twenty lose a little."""
    own = {(i, 0): 0.49 - 0.001 * i for i in range(18)} | {(18, 0): 0.99, (19, 0): 0.98}
    table = paired_tests({"A": dict.fromkeys(own, 0.5), "B": own}, "A", "t")
    assert table.rows[0][1].startswith("+")
    assert table.rows[0][-1] == "worse"


def test_a_narrow_terminal_breaks_few_lines_and_words_last() -> None:
    columns = [["method", "a long name", "b", "c"], ["verdict", "not run", "not run", "not run"]]
    assert widths(columns, 20) == [11, 7]
    assert widths(columns, 19) == [10, 7]  # one line is broken there, three in the other
    assert widths(columns, 15) == [6, 7]
    assert widths(columns, 10) == [6, 2]
    assert widths(columns, 5) == [6, 1]  # nor is a word of the first
    assert widths([["日本語"]], 80) == [6]


def test_brackets_in_names_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    show([Table("[a]", ["client"], [["[red]ward[/red]"], ["[/x]"]], "[b]")])
    told = capsys.readouterr().out
    assert all(words in told for words in ("[a]", "[red]ward[/red]", "[/x]", "[b]"))


def test_a_terminal_has_no_columns_that_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    show([Table("T", ["method", "std", "ours"], [["a", "-", "1"], ["b", "-", "-"]]), Table("U", ["x", "y"], [])])
    told = capsys.readouterr().out
    assert "std" not in told
    assert "ours" in told
    assert "y" in told.split("U")[1]
