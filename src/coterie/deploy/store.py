"""What the clients of a device remember, on its disk: the last few versions of each."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from coterie.core import tree
from coterie.federation.checkpoint import Damaged, read, write
from coterie.federation.model_files import plain

log = logging.getLogger("coterie")
KEPT = 3  # versions of a client: before and after its last training, and one for a server that lost a round


class Store:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.last: dict[int, tuple[str, Any]] = {}  # in memory too: the version of each client made last

    def keep(self, client: int, version: str, state: Any) -> None:
        """On the disk when this returns."""
        folder = self._place(client)
        folder.mkdir(parents=True, exist_ok=True)
        write(self._file(client, version), plain(tree.flatten(state)), {"version": version})
        self.last[client] = version, state
        for path in sorted(folder.glob("state-*.safetensors"), key=lambda path: path.stat().st_mtime_ns)[:-KEPT]:
            path.unlink()

    def find(self, client: int, version: str) -> tree.Tree | None:
        """The tensors of what the client remembered in this version; None if that is not there."""
        path = self._file(client, version)
        if not path.exists():
            return None
        try:
            tensors, about = read(path)
        except Damaged as damage:
            log.warning("%s", damage)
            return None
        os.utime(path)  # in use: it stays
        return tensors if about["version"] == version else None

    def keep_down(self, client: int, version: str, down: tree.Tree) -> None:
        """What the client was sent last: with what it remembers in this version, its personal model."""
        self._place(client).mkdir(parents=True, exist_ok=True)
        write(self._place(client) / "down.safetensors", plain(down), {"version": version})

    def find_down(self, client: int) -> tuple[str, tree.Tree] | None:
        try:
            down, about = read(self._place(client) / "down.safetensors")
        except Damaged:
            return None
        return str(about["version"]), down

    def _place(self, client: int) -> Path:
        return self.folder / f"client-{client}"

    def _file(self, client: int, version: str) -> Path:
        return self._place(client) / f"state-{version[:32]}.safetensors"
