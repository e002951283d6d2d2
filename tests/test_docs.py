"""What the documents say is run, and what is made from code has not drifted."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from benchmarks.ledger import pages
from coterie.catalogue import markdown
from tests import toy

DOCS = Path(__file__).parent.parent / "docs"


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), re.S | re.M)


def test_tables_of_results_are_those_of_the_files() -> None:
    """If this fails: python -m benchmarks.ledger"""
    for path, page in pages().items():
        assert path.read_text(encoding="utf-8") == page


def test_the_method_on_the_page_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    method, use = blocks("add-a-method.md")
    script = tmp_path / "page.py"
    script.write_text(method + "\n" + use, encoding="utf-8")
    made = runpy.run_path(str(script))
    assert capsys.readouterr().out.startswith("[(1, ")
    page = made["FedAvgM"]
    looped, _ = toy.looped(page(train=toy.method("fedavg").train), toy.model(), toy.toy())
    batched, _ = toy.batched(page(train=toy.method("fedavg").train), toy.model(), toy.toy())
    assert toy.distance(looped, batched) < 1e-10
    still, _ = toy.looped(page(train=toy.method("fedavg").train, inertia=0.0), toy.model(), toy.toy())
    fedavg, _ = toy.looped(toy.method("fedavg"), toy.model(), toy.toy())
    weights = [k for k in still if k.startswith("server.weights")]
    assert toy.distance({k: still[k] for k in weights}, {k: fedavg[k] for k in weights}) < 1e-12


def test_the_examples_run(tmp_path: Path) -> None:
    for number, code in enumerate(blocks("../README.md")):  # those of data.md: tests/data/test_documents.py
        script = tmp_path / f"example{number}.py"
        script.write_text(code, encoding="utf-8")
        runpy.run_path(str(script))


def test_the_table_of_methods_is_the_codes() -> None:
    """If this fails: coterie methods --markdown > docs/methods.md"""
    assert (DOCS / "methods.md").read_text(encoding="utf-8") == markdown()
