"""The clients that a device hosts, and their data."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from coterie.api import DataSettings, load_clients
from coterie.core.data import FederatedData
from coterie.core.errors import CoterieError
from coterie.core.packing import names
from coterie.data.user import is_path
from coterie.data.user.arrow_columns import parquet_names
from coterie.data.user.bounds import Unusable
from coterie.data.user.csv_files import csv_names
from coterie.data.user.reading import CLIENTS


def load_hosted_clients(clients: str, wanted: DataSettings) -> tuple[tuple[int, ...], FederatedData]:
    """The clients' numbers, and their data in this order. clients: such as "0-2,5"."""
    ids = numbers(clients)
    if len(ids) == 1 and is_path(wanted.dataset) and is_one_table(wanted):
        wanted = replace(wanted, client_column="")
    data = load_clients(**asdict(wanted))
    if data.transform.inputs:
        raise CoterieError(
            f"federations of devices support samples with one input; those of {wanted.dataset} have "
            f"{names(data.transform.inputs)}; train on one machine with `coterie run`"
        )
    if is_path(wanted.dataset):
        if len(ids) != data.num_clients:
            raise CoterieError(
                f"{wanted.dataset} has {data.num_clients} clients ({', '.join(data.client_names[:10])}), but `clients` "
                f"lists {len(ids)}: {clients}"
            )
        return ids, data
    if max(ids) >= data.num_clients:
        raise CoterieError(f"client {max(ids)} is out of range: this partition has clients 0 to {data.num_clients - 1}")
    return ids, data.pick(ids)


def is_one_table(wanted: DataSettings) -> bool:
    """Whether the dataset is one table without a client column, which then belongs to one client."""
    path = Path(wanted.dataset).expanduser()
    if wanted.client_column is not None or not path.is_file() or path.suffix.lower() not in (".csv", ".parquet"):
        return False
    try:
        names = csv_names(path) if path.suffix.lower() == ".csv" else parquet_names(path)
    except Unusable:
        return False  # loading it reports the error
    return not any(name.lower() in CLIENTS for name in names)


def numbers(text: str) -> tuple[int, ...]:
    """Parse client numbers such as "0-2,5"; ascending, without duplicates."""
    try:
        found = set[int]()
        for part in text.split(","):
            first, _, last = part.partition("-")
            found |= set(range(int(first), int(last or first) + 1))
    except ValueError:
        found = set()
    if not found or len(found) > 100_000:
        raise CoterieError(f"`clients` must be a number or a list such as 0-2,5, got '{text}'")
    return tuple(sorted(found))
