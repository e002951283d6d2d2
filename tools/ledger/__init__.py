"""The pages' tables and findings, made from files of results. No number in them is typed by hand."""

from tools.ledger.files import Files
from tools.ledger.pages import differences, pages, renewed

__all__ = ["Files", "differences", "pages", "renewed"]
