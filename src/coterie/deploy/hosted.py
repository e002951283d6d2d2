"""Which clients a device has, and their data."""

from __future__ import annotations

from dataclasses import asdict

from coterie.api import DataSettings, load_clients
from coterie.core.errors import CoterieError
from coterie.core.samples import FederatedData
from coterie.data.own import is_path


def load_hosted(clients: str, wanted: DataSettings) -> tuple[tuple[int, ...], FederatedData]:
    """Their numbers, and their data in this order. clients: such as 0-2,5."""
    ids, data = numbers(clients), load_clients(**asdict(wanted))
    if is_path(wanted.dataset):
        if len(ids) != data.clients:
            raise CoterieError(f"{wanted.dataset} has {data.clients} clients, and `clients` names {len(ids)}")
        return ids, data
    if max(ids) >= data.clients:
        raise CoterieError(f"client {max(ids)} is none of the {data.clients} clients of this partition")
    return ids, data.pick(ids)


def numbers(text: str) -> tuple[int, ...]:
    """Such as 0-2,5: ascending, each once."""
    try:
        found = set[int]()
        for part in text.split(","):
            first, _, last = part.partition("-")
            found |= set(range(int(first), int(last or first) + 1))
    except ValueError:
        found = set()
    if not found or len(found) > 100_000:
        raise CoterieError(f"`clients` is a number, or numbers such as 0-2,5; not '{text}'")
    return tuple(sorted(found))
