from __future__ import annotations

from tests.papers.conftest import here

__all__ = ["here"]
