"""The pages' tables and findings, made from files of results. No number in them is typed by hand."""

from coterie.ledger.files import Files
from coterie.ledger.pages import differences, pages, renewed

__all__ = ["Files", "differences", "pages", "renewed"]
