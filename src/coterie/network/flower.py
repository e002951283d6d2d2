"""Flower as a line to devices: parcels of bytes, which it carries and need not understand.

query.hello       who are you? With the terms of the federation, once it has begun
train.letters     letters to clients of a node, with what all are sent alike
query.over        the federation has ended: leave your models
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from coterie.core.errors import CoterieError
from coterie.network.wire import Refused

KINDS = {"hello": "query.hello", "letters": "train.letters", "over": "query.over"}
QUIET = {  # nobody is told that this runs, and nothing is installed while it does, unless the user wants it
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}


class Parcel(NamedTuple):
    words: Mapping[str, str]
    parts: tuple[bytes, ...] = ()


class Line:
    """What the server needs of Flower's grid."""

    def __init__(self, grid: Any) -> None:
        self.grid = grid

    def nodes(self) -> dict[int, str]:
        """Those that are there, each with the moment at which it came."""
        return {node.node_id: node.last_activated_at for node in self.grid.get_nodes()}

    def push(self, node: int, kind: str, parcel: Parcel, seconds: float, group: str = "") -> str | None:
        """The name under which the reply will be found; None if there is no such node any more."""
        message = library().app.Message(pack(parcel), node, KINDS[kind], ttl=seconds, group_id=group)
        names = list(self.grid.push_messages([message]))
        return names[0] if names else None

    def pull(self, names: Iterable[str]) -> list[tuple[str, Parcel]]:
        """Replies that are there by now."""
        found = []
        for message in self.grid.pull_messages(list(names)):
            try:
                parcel = trouble(message.error.reason) if message.has_error() else unpack(message.content)
            except Refused as reason:
                parcel = trouble(str(reason))
            found.append((message.metadata.reply_to_message_id, parcel))
        return found


def trouble(reason: str | None) -> Parcel:
    """Instead of an answer."""
    return Parcel({"trouble": reason or "it did not say why"})


def library() -> Any:
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import flwr.app
        import flwr.clientapp
        import flwr.serverapp
    except ImportError:
        raise CoterieError("Flower is not here: pip install 'coterie[flower]', in an environment of its own") from None
    return flwr


def pack(parcel: Parcel) -> Any:
    """Parts as arrays, of which Flower keeps one however many nodes they go to."""
    app = library().app
    arrays = {str(i): app.Array("uint8", (len(part),), "bytes", part) for i, part in enumerate(parcel.parts)}
    return app.RecordDict({"words": app.ConfigRecord(dict(parcel.words)), "parts": app.ArrayRecord(arrays)})


def unpack(content: Any) -> Parcel:
    words, arrays = content.config_records.get("words", {}), content.array_records.get("parts", {})
    names = [str(i) for i in range(len(arrays))]
    if set(arrays) != set(names) or not all(isinstance(word, str) for word in words.values()):
        raise Refused("it is no parcel of Coterie's")
    return Parcel(dict(words), tuple(arrays[name].data for name in names))
