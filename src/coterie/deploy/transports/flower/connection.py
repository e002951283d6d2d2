"""A connection to Flower nodes that carries packets of bytes.

query.hello       asks a node for its hello; includes the terms of the federation, once it has begun
train.requests    requests to the clients of a node, with their shared part
query.over        the federation has ended: save the models
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from coterie.core.errors import CoterieError
from coterie.deploy.wire import Refused

KINDS = {"hello": "query.hello", "requests": "train.requests", "over": "query.over"}
QUIET = {  # no telemetry, no update check and no installation at run time, unless the user sets these
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}


class Packet(NamedTuple):
    words: Mapping[str, str]
    parts: tuple[bytes, ...] = ()


class FlowerConnection:
    """The part of Flower's grid that the server uses."""

    def __init__(self, grid: Any) -> None:
        self.grid = grid

    def nodes(self) -> dict[int, str]:
        """Connected nodes, and when each one connected."""
        return {node.node_id: node.last_activated_at for node in self.grid.get_nodes()}

    def push(self, node: int, kind: str, packet: Packet, seconds: float, group: str = "") -> str | None:
        """Send a packet; returns the id to pull its reply with, or None if the node is gone."""
        message = library().app.Message(pack(packet), node, KINDS[kind], ttl=seconds, group_id=group)
        ids = list(self.grid.push_messages([message]))
        return ids[0] if ids else None

    def pull(self, ids: Iterable[str]) -> list[tuple[str, Packet]]:
        """The replies that have arrived."""
        found = []
        for message in self.grid.pull_messages(list(ids)):
            try:
                packet = error_packet(message.error.reason) if message.has_error() else unpack(message.content)
            except Refused as reason:
                packet = error_packet(str(reason))
            found.append((message.metadata.reply_to_message_id, packet))
        return found


def error_packet(reason: str | None) -> Packet:
    """A reply that reports an error."""
    return Packet({"error": reason or "unknown error"})


def library() -> Any:
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import flwr.app
        import flwr.clientapp
        import flwr.serverapp
    except ImportError:
        raise CoterieError(
            "Flower is not installed: pip install 'coterie[flower]', in a separate environment"
        ) from None
    return flwr


def pack(packet: Packet) -> Any:
    """Parts become arrays, which Flower stores once however many nodes they are sent to."""
    app = library().app
    arrays = {str(i): app.Array("uint8", (len(part),), "bytes", part) for i, part in enumerate(packet.parts)}
    return app.RecordDict({"words": app.ConfigRecord(dict(packet.words)), "parts": app.ArrayRecord(arrays)})


def unpack(content: Any) -> Packet:
    words, arrays = content.config_records.get("words", {}), content.array_records.get("parts", {})
    names = [str(i) for i in range(len(arrays))]
    if set(arrays) != set(names) or not all(isinstance(word, str) for word in words.values()):
        raise Refused("not a packet of Coterie")
    return Packet(dict(words), tuple(arrays[name].data for name in names))
