from __future__ import annotations

from tests.papers.conftest import here
from tests.personal.conftest import made

__all__ = ["here", "made"]
