from __future__ import annotations

from tests.personal.conftest import made

__all__ = ["made"]
