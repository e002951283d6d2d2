"""Data of one's own: read in many forms, checked, and made a dataset."""

from coterie.data.own.check import Report, check, lines
from coterie.data.own.read import is_path, read_own
from coterie.data.own.reading import Reading
from coterie.data.own.torch_datasets import clients_from

__all__ = ["Reading", "Report", "check", "clients_from", "is_path", "lines", "read_own"]
