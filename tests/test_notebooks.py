"""The notebooks in examples/ run from top to bottom, and the outputs that they keep are small and of this code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("nbclient")

import nbformat

from tools import notebooks

PATHS = notebooks.notebooks()
MOST_BYTES = 100_000
NOT_OURS = ("ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")


def code(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds(cell: nbformat.NotebookNode) -> list[tuple[str, ...]]:
    return [(output.output_type, *sorted(output.get("data", {}))) for output in cell.outputs]


def test_there_are_three() -> None:
    assert {path.stem for path in PATHS} == {
        "first-steps",
        "compare-for-a-paper",
        "personal-models-and-new-clients",
    }


@pytest.mark.long
@pytest.mark.filterwarnings(*NOT_OURS)
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_it_keeps(path: Path, tmp_path: Path) -> None:
    """If outputs differ in kind: python -m tools.notebooks"""
    kept, new = nbformat.read(path, as_version=4), notebooks.executed(path, tmp_path)
    assert [kinds(cell) for cell in code(new)] == [kinds(cell) for cell in code(kept)]
    assert list(tmp_path.iterdir()) == []  # nothing is left where the reader starts it


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_outputs_are_small_and_of_no_machine(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert path.stat().st_size <= MOST_BYTES
    notebook = json.loads(text)
    outputs = json.dumps([cell.get("outputs", []) for cell in notebook["cells"]])
    assert re.findall(r"(?:/tmp|/home|/root|/Users|/work|/var|/usr|/opt)\b[^\"]{0,40}", outputs) == []
    assert '"output_type": "error"' not in text
    assert [cell["execution_count"] for cell in notebook["cells"] if cell["cell_type"] == "code"] == [
        number + 1 for number in range(len(code(nbformat.read(path, as_version=4))))
    ]
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
