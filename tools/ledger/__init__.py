"""Generates the tables and findings of docs/results.md, docs/claims.md and the READMEs from result files."""

from tools.ledger.files import Files
from tools.ledger.pages import differences, pages, renewed

__all__ = ["Files", "differences", "pages", "renewed"]
