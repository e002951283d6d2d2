"""Release notes are the section of the changelog, and a release without one is refused."""

from __future__ import annotations

import pytest
from tools.release_notes import CHANGELOG, notes

from coterie.core.version import VERSION

CHANGES = """# Changelog

## [1.1.0] - unreleased

### Added

- A thing ([2]).

## [1.0.0] - 2026-01-02

- The first.

## [0.9.0]

[2]: https://example.org/2
"""


def test_the_section_of_a_version() -> None:
    assert notes("1.1.0", CHANGES) == "### Added\n\n- A thing ([2])."
    assert notes("1.0.0", CHANGES) == "- The first."


def test_what_has_no_notes_is_refused() -> None:
    with pytest.raises(SystemExit, match=r"no section for 3\.0; it has: 1\.1\.0, 1\.0\.0, 0\.9\.0"):
        notes("3.0", CHANGES)
    with pytest.raises(SystemExit, match=r"says nothing about 0\.9\.0"):
        notes("0.9.0", CHANGES)


def test_this_version_has_notes() -> None:
    assert "### Added" in notes(VERSION, CHANGELOG.read_text(encoding="utf-8"))
