"""Read and check users' data in many formats."""

from coterie.data.user.by_name import Table, read_table_by
from coterie.data.user.check import Report, check, lines
from coterie.data.user.read import is_path, read_own
from coterie.data.user.reading import Reading
from coterie.data.user.torch_datasets import clients_from

__all__ = [
    "Reading",
    "Report",
    "Table",
    "check",
    "clients_from",
    "is_path",
    "lines",
    "read_own",
    "read_table_by",
]
