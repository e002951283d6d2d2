"""Tables in their forms, read back."""

from __future__ import annotations

import csv
import io

import numpy as np
import pytest
from scipy import stats

from coterie.analysis.comparison import Comparison
from coterie.analysis.paired import paired_tests
from coterie.analysis.tables import TextTable, as_csv, latex, markdown, show
from coterie.analysis.terminal import widths
from coterie.core.errors import CoterieError
from coterie.federation.history import worst_tenth_text

TABLE = TextTable("A & B", ["method", "95 %"], [["Fed_PAC", "81.1 ± 0.2"], ['a|b, "c"', "-"]], "See #1.")


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
    assert r"$\varepsilon$ & " in latex(TextTable("t", ["ε", "a"], []))  # the privacy column; pdfLaTeX knows no ε


def test_a_form_that_does_not_exist() -> None:
    with pytest.raises(CoterieError, match="did you mean 'latex'"):
        show([TABLE], "latx")


def compared(means: dict[str, list[list[float]]], vary: bool = False) -> Comparison:
    """Method -> for each seed, accuracies of the clients. vary: every seed has a partition of its own."""
    rows = [
        {"method": name, "seed": seed, "mean": sum(own) / len(own), "worst10": min(own), "megabytes": 1.0,
         "content": f"data{seed if vary else ''}", "clients": [*range(len(own))], "scores": own}
        for name, seeds in means.items()
        for seed, own in enumerate(seeds)
    ]  # fmt: skip
    return Comparison(rows, "toy", 3)


BETTER = [[0.5, 0.6, 0.7], [0.6, 0.7, 0.8]]
WORSE = [[0.4, 0.45, 0.5], [0.35, 0.4, 0.45]]


def test_comparison_by_hand() -> None:
    """Three clients in two seeds are three pairs, not six: each client is averaged over seeds first."""
    accuracies, tests = compared({"Low": WORSE, "High": BETTER}).text_tables()
    assert accuracies.header[:4] == ["method", "accuracy", "SD", "worst 10 % (1 client)"]
    assert accuracies.rows[1][:3] == ["High", "65.00 ± 63.53", "7.07"]  # 12.706 * 7.0711 / √2
    assert "does not include its choice (--partition-seed vary does)" in accuracies.note
    ((name, difference, pairs, p, corrected, verdict),) = tests.rows
    assert (name, difference, pairs) == ("Low", "-22.50", "3")
    assert float(p) == float(corrected) == 2 / 2**3  # all three of one sign, no ties
    assert verdict == "no difference shown"
    assert "Holm" in tests.note
    assert "Wilcoxon" in tests.note
    assert "Clients are the same in all 2 seeds: each is averaged over seeds and is one pair." in tests.note


def test_twenty_clients_in_three_seeds_are_twenty_pairs() -> None:
    """Three copies of the same run show no more than one does."""
    draw = np.random.default_rng(0)
    a, b = draw.uniform(0.6, 0.9, 20).tolist(), draw.uniform(0.62, 0.92, 20).tolist()
    once, thrice = (compared({"A": [a] * n, "B": [b] * n}).text_tables()[1].rows[0] for n in (1, 3))
    assert once == thrice
    assert once[2] == "20"
    assert float(once[3]) == pytest.approx(stats.wilcoxon(np.array(a) - np.array(b), method="exact").pvalue, abs=5e-4)


def test_every_partition_is_a_pair_where_it_varies() -> None:
    accuracies, tests = compared({"Low": WORSE, "High": BETTER}, vary=True).text_tables()
    ((name, difference, pairs, p, *_),) = tests.rows
    assert (name, difference, pairs) == ("Low", "-22.50", "2")
    assert float(p) == pytest.approx(stats.ttest_rel([0.45, 0.40], [0.6, 0.7]).pvalue, abs=5e-4)
    assert "Paired t test" in tests.note
    assert "the 2 partitions differ by seed, and each is one pair" in tests.note
    assert "each seed has its own partition, which the interval includes" in accuracies.note


def test_one_seed_is_paired_by_client() -> None:
    _, tests = compared({"Low": WORSE[:1], "High": BETTER[:1]}).text_tables()
    assert tests.rows[0][2] == "3"
    assert "Each client is one pair." in tests.note
    assert "seeds" not in tests.note


def test_only_what_both_have_is_paired() -> None:
    """Not a client of another seed, and not one of another partition."""
    samples = {
        "A": {("p", 0, 0): 0.5, ("p", 0, 1): 0.5, ("p", 1, 1): 0.7},
        "B": {("p", 0, 1): 0.4, ("p", 1, 1): 0.4},
        "C": {("p", 7, 7): 1.0},
    }
    table = paired_tests(samples, "A", "t")
    assert [row[:3] for row in table.rows] == [["B", "-20.00", "1"]]
    with pytest.raises(CoterieError, match="test against"):
        paired_tests(samples, "D", "t")
    other = {"A": {("p", 0, 0): 0.5}, "B": {("q", 0, 0): 0.4}}
    assert paired_tests(other, "A", "t").rows == []


def test_better_or_worse_is_by_ranks() -> None:
    """Two clients that gain much lift the mean; eighteen of twenty lose a little."""
    own = {("", 0, i): 0.49 - 0.001 * i for i in range(18)} | {("", 0, 18): 0.99, ("", 0, 19): 0.98}
    table = paired_tests({"A": dict.fromkeys(own, 0.5), "B": own}, "A", "t")
    assert table.rows[0][1].startswith("+")
    assert table.rows[0][-1] == "worse"


@pytest.mark.parametrize(
    ("clients", "said"), [([4], "1 client"), ([20], "2 clients"), ([39], "3 clients"), ([6, 20], "1 to 2 clients")]
)
def test_how_many_the_worst_tenth_are(clients: list[int], said: str) -> None:
    assert worst_tenth_text(clients) == said


def test_a_narrow_terminal_breaks_few_lines_and_words_last() -> None:
    columns = [["method", "a long name", "b", "c"], ["verdict", "not run", "not run", "not run"]]
    assert widths(columns, 20) == [11, 7]
    assert widths(columns, 19) == [10, 7]  # one line is broken there, three in the other
    assert widths(columns, 15) == [6, 7]
    assert widths(columns, 10) == [6, 2]
    assert widths(columns, 5) == [6, 1]  # nor is a word of the first
    assert widths([["日本語"]], 80) == [6]


def test_brackets_in_names_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    show([TextTable("[a]", ["client"], [["[red]ward[/red]"], ["[/x]"]], "[b]")])
    told = capsys.readouterr().out
    assert all(words in told for words in ("[a]", "[red]ward[/red]", "[/x]", "[b]"))


def test_a_terminal_has_no_columns_that_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    show(
        [TextTable("T", ["method", "std", "ours"], [["a", "-", "1"], ["b", "-", "-"]]), TextTable("U", ["x", "y"], [])]
    )
    told = capsys.readouterr().out
    assert "std" not in told
    assert "ours" in told
    assert "y" in told.split("U")[1]
