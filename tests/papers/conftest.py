from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the command line is called in this process, and leaves no trace."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    log = logging.getLogger("coterie")
    monkeypatch.setattr(log, "handlers", [*log.handlers])
    return tmp_path
