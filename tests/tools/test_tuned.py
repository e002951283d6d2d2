"""The tuned leaderboard of docs/leaderboard.md: made from files, and checked."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from tools.ledger import tuned
from tools.ledger.pages import renewed

from coterie.papers.leaderboard import BoardFolder, read_rules

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = (ROOT / "docs" / "leaderboard.md").read_text(encoding="utf-8")


def made(folder: Path) -> str:
    return renewed(PAGE, {mark: f"\n\n{text}\n\n" for mark, text in tuned.blocks(folder).items()}, "page")


def test_the_page_is_that_of_the_files_and_a_typed_number_shows(tmp_path: Path) -> None:
    assert made(RESULTS) == PAGE
    assert tuned.picture(RESULTS) == (ROOT / "docs" / "pictures" / tuned.PICTURE).read_text(encoding="utf-8")
    block = PAGE.split("<!-- tuned -->")[1].split("<!-- end -->")[0]
    number = re.search(r"\d\d\.\d\d ± ", block)
    assert number
    typed = PAGE.replace(number[0], "99.99 ± ", 1)
    blocks = {mark: f"\n\n{text}\n\n" for mark, text in tuned.blocks(RESULTS).items()}
    assert renewed(typed, blocks, "page") == PAGE != typed


def test_another_result_makes_another_page(tmp_path: Path) -> None:
    shutil.copytree(RESULTS / tuned.FOLDER, tmp_path / tuned.FOLDER)
    folder = BoardFolder(tmp_path / tuned.FOLDER, read_rules())
    key, content = next((k, c) for k, c in folder.load().items() if k.seed is not None)
    folder.add(key, content | {"scores": [0.125] * len(content["scores"])})
    assert made(tmp_path) != PAGE
