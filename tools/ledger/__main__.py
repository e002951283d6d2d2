"""Write the tables of docs/results.md, docs/claims.md and the READMEs from result files, or check them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from coterie.core.errors import CoterieError
from tools.ledger import Files, differences, pages


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.ledger", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is out of date")
    parser.add_argument("--results", metavar="FOLDER", default="benchmarks/results", help="default: benchmarks/results")
    chosen = parser.parse_args(argv)
    try:
        return update(Path(chosen.results), chosen.check)
    except CoterieError as error:
        print(f"ledger: {error}", file=sys.stderr)
        return 2


def update(results: Path, check: bool) -> int:
    """Write the pages, or list those that are out of date. Returns the exit code."""
    files, changed = Files(results), False
    if left := files.in_no_table():
        reason = "settings that differ from their recipe, or a repeated training"
        print(f"ledger: {len(left)} results appear in no table ({reason}), for example {left[0]}", file=sys.stderr)
    for path, (old, new) in pages(files, Path()).items():
        if old == new:
            continue
        changed = True
        if check:
            print(f"{path} does not match {results}: {'; '.join(differences(old, new))}")
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(new, encoding="utf-8")
        except OSError as error:
            raise CoterieError(f"cannot write {path}: {error.strerror}") from None
        print(path)
    return 1 if changed and check else 0


if __name__ == "__main__":
    sys.exit(main())
