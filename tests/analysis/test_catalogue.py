"""The catalogue of methods: declared words, citations, filters, suggestions."""

from __future__ import annotations

import inspect
import io
import json
import re
import sys
from pathlib import Path

import pytest

from coterie.analysis import catalogue
from coterie.analysis.catalogue import MethodEntry, entries, recorded
from coterie.analysis.choosing import Filters, by_traffic, suggestions, years
from coterie.analysis.citations import CITATION, CONFERENCES, JOURNALS, Citation, bibtex, described, key
from coterie.analysis.methods_page import HEADER
from coterie.cli import main
from coterie.core.errors import CoterieError
from coterie.core.families import DESIGNED, FAMILIES, SITUATIONS
from coterie.methods import METHODS, FedAvg
from coterie.models.cnn import conv4
from coterie.privacy.robust import ONE_FOR_ALL, PAPERS

PAGE = Path(__file__).parents[2] / "docs" / "methods.md"
NO_VENUE = {"fedreg", "fedpac-proto"}  # their docstrings name a year only
NO_FIRST_NAMES = {"fedpac-proto"}  # its text has none in Latin letters


@pytest.fixture(scope="module")
def listed() -> list[MethodEntry]:
    return entries()


def names(found: list[MethodEntry]) -> set[str]:
    return {e.name for e in found}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_declares_a_family_and_cites_its_paper(name: str) -> None:
    kind = METHODS[name]
    assert kind.family in FAMILIES
    assert set(kind.suits) <= set(DESIGNED)
    about, citation, _ = described(kind)
    assert about.endswith(".")
    if name == "local":
        assert citation is None
        return
    assert citation is not None
    assert 2016 <= citation.year <= 2026
    assert citation.title
    assert all(citation.authors)
    assert bool(citation.venue) == (name not in NO_VENUE)
    kind, cited_as, entry = parsed(bibtex(name, citation))
    assert re.fullmatch(r"[a-z]+20\d\d[a-z0-9]+", cited_as)
    assert entry["title"] == f"{{{citation.title}}}"
    assert entry["year"] == str(citation.year)
    for author in entry["author"].split(" and "):
        assert name in NO_FIRST_NAMES or re.fullmatch(r"[^\W\d_].* ([^\W\d_][\w-]+|\{\w+( \w+)+\})", author), author
    if citation.venue == "arXiv":
        assert kind == "misc"
        assert re.fullmatch(r"\d{4}\.\d{5}", entry["eprint"])
    elif citation.venue:
        field = {"article": "journal", "inproceedings": "booktitle"}[kind]
        assert citation.venue in (CONFERENCES | JOURNALS)
        assert len(entry[field].split()) > 3  # not an abbreviation


def parsed(entry: str) -> tuple[str, str, dict[str, str]]:
    """Read a BibTeX entry by its braces: kind, key, fields."""
    start = re.match(r"@(\w+)\{(\w+),", entry)
    assert start
    found, depth, opened, name = {}, 1, start.end(), ""
    for at in range(start.end(), len(entry)):
        match entry[at]:
            case "{":
                if depth == 1:
                    (name,) = re.fullmatch(r",?\s*(\w+) = ", entry[opened:at]).groups()  # type: ignore[union-attr]
                    opened = at + 1
                depth += 1
            case "}":
                depth -= 1
                if depth == 1:
                    found[name], opened = entry[opened:at], at + 1
        assert depth > 0 or at == len(entry) - 1
    assert depth == 0
    return start[1], start[2], found


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_formula(name: str) -> None:
    assert "formula" in vars(METHODS[name])  # its own
    lines = inspect.cleandoc(METHODS[name].formula).splitlines()
    assert 1 <= len(lines) <= 6
    for line in lines:
        assert len(line) <= 112  # fits on the page
        assert all(line.count(a) == line.count(b) for a, b in ("()", "[]", "{}", "⟨⟩")), line
    assert any(sign in "".join(lines) for sign in "←=")
    section = re.search(rf"^### {name}\n(.*?)(?=^##|\Z)", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    assert section
    assert "\n".join(["```text", *lines, "```"]) in section[1]
    assert "\n".join(lines) in (METHODS[name].__doc__ or "")


def test_families_are_few_and_used() -> None:
    assert len(FAMILIES) <= 12
    assert {kind.family for kind in METHODS.values()} == set(FAMILIES)


def test_keys_are_unique() -> None:
    cited = {name: described(kind).citation for name, kind in METHODS.items()}
    keys = [key(name, citation) for name, citation in cited.items() if citation]
    assert len(set(keys)) == len(keys) == len(METHODS) - 1
    assert {"zhang2023fedala", "li2021ditto", "mcmahan2017fedavg", "li2020qfedavg"} <= set(keys)


def test_a_citation_is_read_to_its_end() -> None:
    found = CITATION.fullmatch("Ong, de la Cruz: Act, Think: A Study of 2019, NeurIPS 2020 (a note). More.")
    assert found
    assert found.group("authors", "title", "venue", "year", "note", "details") == (
        "Ong, de la Cruz", "Act, Think: A Study of 2019", "NeurIPS", "2020", "a note", "More.",
    )  # fmt: skip


COMPLETE = """\
@inproceedings{mcmahan2017fedavg,
  author = {Brendan McMahan and Eider Moore and Daniel Ramage and Seth Hampson and Blaise {Agüera y Arcas}},
  title = {{Communication-Efficient Learning of Deep Networks from Decentralized Data}},
  booktitle = {International Conference on Artificial Intelligence and Statistics},
  year = {2017},
}

@article{sattler2021cfl,
  author = {Felix Sattler and Klaus-Robert Müller and Wojciech Samek},
  title = {{Clustered Federated Learning: Model-Agnostic Distributed Multitask Optimization Under Privacy Constraints}},
  journal = {IEEE Transactions on Neural Networks and Learning Systems},
  year = {2021},
}

@misc{deng2020apfl,
  author = {Yuyang Deng and Mohammad Mahdi Kamani and Mehrdad Mahdavi},
  title = {{Adaptive Personalized Federated Learning}},
  eprint = {2003.13461},
  archiveprefix = {arXiv},
  year = {2020},
}
"""


def test_entries_are_complete(capsys: pytest.CaptureFixture[str]) -> None:
    main(["cite", "fedavg", "cfl", "apfl"])
    assert capsys.readouterr().out == COMPLETE


def test_entries_are_utf8_in_any_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="ascii", newline="\n"))
    main(["cite", "fedavg", "cfl", "apfl"])
    sys.stdout.flush()
    assert out.getvalue().decode() == COMPLETE


def test_unknown_venues_and_compound_surnames() -> None:
    ours = Citation(("Ana Sofía {de la Cruz}", "B. Ong"), "Act", "My Workshop", 2020, "")
    kind, cited_as, entry = parsed(bibtex("act-1", ours))
    assert (kind, cited_as) == ("inproceedings", "delacruz2020act1")
    assert entry["author"] == "Ana Sofía {de la Cruz} and B. Ong"
    assert entry["booktitle"] == "My Workshop"


def test_words_are_strict_and_optional() -> None:
    class Plain(FedAvg):
        pass

    assert Plain.family == "global model"
    with pytest.raises(CoterieError, match="Odd: unknown family 'clusterz': did you mean 'clusters'"):
        type("Odd", (FedAvg,), {"family": "clusterz"})
    with pytest.raises(CoterieError, match="unknown situation to declare 'little bandwidth'"):
        type("Odd", (FedAvg,), {"suits": ("little bandwidth",)})  # derived
    with pytest.raises(CoterieError, match="must be a tuple"):
        type("Odd", (FedAvg,), {"suits": "label shift"})


def test_filters(listed: list[MethodEntry]) -> None:
    assert names(Filters(family="Clusters").chosen(listed)) == {"hypcluster", "cfl"}
    assert names(Filters(family="personal-layers", year="2020-2021").chosen(listed)) == {"lg-fedavg", "fedbn"}
    assert names(Filters(year="-2018").chosen(listed)) == {"fedavg"}
    assert names(Filters(year="2024-").chosen(listed)) == {
        "fedpac-proto", "fedreg", "pfakd", "fedas", "pfedfda", "fedtgp", "floco",
    }  # fmt: skip


def test_a_method_without_a_record_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = recorded()
    monkeypatch.setattr(catalogue, "recorded", dict)
    for name in ("fedavg", "fedgh"):
        assert MethodEntry(name, METHODS[name]()).behavior == expected[name]


def test_filters_by_content(listed: list[MethodEntry]) -> None:
    assert names(Filters(sends="prototypes").chosen(listed)) == {
        "fedproto", "fedtgp", "fedgh", "gpfl", "fedpac", "fedpac-proto", "pfedfda",
    }  # fmt: skip
    assert names(Filters(sends="several models").chosen(listed)) == {"fedfomo", "hypcluster", "fedem", "apple"}
    assert names(Filters(sends="nothing").chosen(listed)) == {"local"}
    assert names(Filters(sends="some layers").chosen(listed)) == {"fedbn"}


def test_filters_by_task(listed: list[MethodEntry]) -> None:
    everything = Filters(task="classification").chosen(listed)
    assert everything == listed
    numbers = names(Filters(task="regression").chosen(listed))
    assert numbers == {name for name, kind in METHODS.items() if not kind.needs_classes}


def test_filters_by_traffic(listed: list[MethodEntry]) -> None:
    assert names(Filters(suits=("little bandwidth",)).chosen(listed)) == {"lg-fedavg", "fedproto", "fedgh", "fedtgp"}
    assert names(Filters(suits=("little bandwidth",), task="regression").chosen(listed)) == {"lg-fedavg"}


def test_filters_by_share_of_traffic(listed: list[MethodEntry], capsys: pytest.CaptureFixture[str]) -> None:
    less = Filters(traffic=0.5).chosen(listed)
    assert names(less) == {"local", "lg-fedavg", "fedproto", "fedgh", "fedtgp"}
    ordered = by_traffic(listed)
    assert ordered[0].name == "local"
    assert ordered[-1].name == "apple"  # all models of all clients
    assert [e.share for e in ordered] == sorted(e.share for e in listed)
    main(["methods", "--sort", "traffic", "--traffic", "0.5", "--json"])
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == [e.name for e in by_traffic(less)]
    main(["methods", "--sort", "traffic", "--task", "segmentation"])
    assert re.search(r"^moon +100\.0% +468,264 +468,268 ", capsys.readouterr().out, re.MULTILINE)
    with pytest.raises(CoterieError, match="--traffic must be at least 0, got -0"):
        Filters(traffic=-0.5).chosen(listed)


def test_filters_by_need(listed: list[MethodEntry]) -> None:
    for need in ("classes", "norm", "sgd", "head", "encoder"):
        found = names(Filters(needs=(need,)).chosen(listed))
        assert found == {name for name, kind in METHODS.items() if getattr(kind, f"needs_{need}")}
        assert found
    both = names(Filters(needs=("Classes", "head")).chosen(listed))
    assert both == {name for name, kind in METHODS.items() if kind.needs_classes and kind.needs_head}
    with pytest.raises(CoterieError, match="unknown need 'clases': did you mean 'classes'"):
        Filters(needs=("clases",)).chosen(listed)


def test_fedbn_keeps_normalization_layers_in_its_record() -> None:
    """Its bytes are those of a network that has some: weight, bias, mean and variance of 4 layers of 64 channels."""
    record = recorded()["fedbn"]
    assert record.model - record.bytes_down == 4 * 4 * 64 * 4
    network = conv4((1, 28, 28), 10, bn="stats")
    assert f"{sum(p.numel() for p in network.parameters()):,} parameters" in HEADER


def test_robust_aggregation_is_cited(capsys: pytest.CaptureFixture[str]) -> None:
    """One entry for each paper, also of two names."""
    main(["cite", "krum", "Multi-Krum", "bulyan", "geometric_median", "fedbn"])
    found = capsys.readouterr().out
    assert re.findall(r"@\w+{(\w+),", found) == [
        "blanchard2017krum", "elmhamdi2018bulyan", "pillutla2022geometricmedian", "li2021fedbn",
    ]  # fmt: skip
    assert "journal = {IEEE Transactions on Signal Processing}" in found
    assert {how for hows in PAPERS for how in hows} == set(ONE_FOR_ALL)


def test_filters_by_protection(listed: list[MethodEntry]) -> None:
    few = [e for e in listed if e.name in ("fedavg", "fedala", "fedfomo", "local", "fedgh")]
    assert names(Filters(private="dp-sample").chosen(few)) == {"fedavg", "local"}
    assert names(Filters(private="dp-client").chosen(few)) == {"fedavg", "fedala"}
    assert names(Filters(private="encrypt").chosen(few)) == {"fedavg", "fedala"}
    assert names(Filters(suits=("privacy",)).chosen(few)) == {"fedavg"}


@pytest.mark.parametrize(
    ("text", "span"),
    [("2021", (2021, 2021)), ("2021-2023", (2021, 2023)), ("2021-", (2021, 9999)), ("-2020", (0, 2020))],
)
def test_years(text: str, span: tuple[int, int]) -> None:
    assert years(text) == span


@pytest.mark.parametrize("situation", SITUATIONS)
def test_suggestions_fit_what_the_class_says(situation: str, listed: list[MethodEntry]) -> None:
    found = suggestions(listed, [situation])
    assert 0 < len(found) < len(listed)
    assert all(s.met == [situation] and s.reason for s in found)
    for s in found:
        assert ("one class per sample" in s.reason) == s.entry.method.needs_classes
        assert ("normalization layers" in s.reason) == s.entry.method.needs_norm
    declared = [situation in s.entry.method.suits for s in found]
    assert declared == sorted(declared, reverse=True)  # design first
    chosen = {s.entry.name for s in found}
    assert {name for name, kind in METHODS.items() if situation in kind.suits} <= chosen
    if situation == "no classes needed":
        assert chosen == {name for name, kind in METHODS.items() if not kind.needs_classes}
    if situation == "many clients":
        assert chosen.isdisjoint({"scaffold", "moon", "ditto", "fedrep", "afl"})  # these keep something per client


def test_several_situations(listed: list[MethodEntry]) -> None:
    both = suggestions(listed, ["feature shift", "new-clients"])
    assert {s.entry.name for s in both} == {"feddbe", "hypcluster", "pfedfda"}
    assert both[0].entry.name == "hypcluster"  # the only one designed for both
    most = suggestions(listed, ["feature shift", "little bandwidth", "new clients"])
    assert {len(s.met) for s in most} == {2}  # none meets three
    assert suggestions([], ["label shift"]) == []


def test_commands(capsys: pytest.CaptureFixture[str]) -> None:
    main(["cite", "FedAdam", "fedyogi", "ditto"])
    out = capsys.readouterr().out
    assert re.findall(r"^@\w+\{(\w+),$", out, re.M) == ["reddi2021fedopt", "li2021ditto"]
    main(["methods", "--suggest", "little bandwidth", "--family", "personal layers"])
    out = capsys.readouterr().out
    assert "lg-fedavg" in out
    assert "not a measurement" in " ".join(out.split())
    main(["methods", "--suggest", "little bandwidth", "--family", "personal layers", "--json"])
    assert [s["name"] for s in json.loads(capsys.readouterr().out)] == ["lg-fedavg"]
    main(["methods", "--family", "clusters", "--year", "2024-"])
    assert capsys.readouterr().out == "No method matches all of these filters.\n"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["cite", "fedalaa"], "unknown method 'fedalaa': did you mean 'fedala'?"),
        (["cite", "local"], "Local has no paper"),
        (["methods", "--family", "clusers"], "unknown family 'clusers': did you mean 'clusters'?"),
        (["methods", "--year", "2023-2021"], "use 2021-2023"),
        (["methods", "--year", "20212023"], "--year must be a year or a range"),
        (["methods", "--year", "-"], "--year must be a year or a range"),
        (["methods", "--task", "regresion"], "did you mean 'regression'?"),
        (["methods", "--private", "dp"], "known: dp-client, dp-sample, encrypt"),
        (["methods", "--sends", "prototype"], "did you mean 'prototypes'?"),
        (["methods", "--suits", "labels"], "did you mean 'label shift'?"),
        (["methods", "--suggest", "labl shift"], "did you mean 'label shift'?"),
        (["methods", "--suggest"], "--suggest needs a situation"),
    ],
)
def test_wrong_words_get_one_line(command: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(command)
    err = capsys.readouterr().err
    assert stop.value.code == 2
    assert said in err
    assert err.count("\n") == 1


def test_the_page_has_one_anchor_per_method() -> None:
    page = (Path(__file__).parents[2] / "docs" / "methods.md").read_text(encoding="utf-8")
    sections = re.findall(r"^### (.+)$", page, re.M)
    assert sorted(sections) == sorted(METHODS)
    assert sorted(re.findall(r"^\| \[`[^`]+`\]\(#([^)]+)\)", page, re.M)) == sorted(METHODS)
    assert page.count("```text\n@") == len(METHODS) - 1
    assert all(word in page for word in (*FAMILIES.values(), *SITUATIONS))
