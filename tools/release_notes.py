"""The notes of a release, from CHANGELOG.md.

python -m tools.release_notes            of the version of this source tree
python -m tools.release_notes 2.0.0
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from coterie.core.version import VERSION

CHANGELOG = Path(__file__).parents[1] / "CHANGELOG.md"
HEADING = re.compile(r"^## \[([^\]]+)\].*$", re.M)


def notes(version: str, changelog: str) -> str:
    """The section of a version, without its heading. Ends the program if there is none, or if it is empty."""
    headings = list(HEADING.finditer(changelog))
    for heading, following in zip(headings, [*headings[1:], None], strict=True):
        if heading[1] == version:
            found = changelog[heading.end() : following.start() if following else None]
            text = re.sub(r"^\[[^\]]+\]: \S+$", "", found, flags=re.M).strip()  # links at the end of the file
            if text:
                return text
            raise SystemExit(f"CHANGELOG.md says nothing about {version}")
    known = ", ".join(heading[1] for heading in headings)
    raise SystemExit(f"CHANGELOG.md has no section for {version}; it has: {known}")


def main(versions: Sequence[str]) -> None:
    print(notes(versions[0] if versions else VERSION, CHANGELOG.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main(sys.argv[1:])
