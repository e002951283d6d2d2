"""The states of a device's clients on disk: the last few versions of each.

    client-3/state-000000000017-0f3a....safetensors    a counter, then the version
    client-3/down.safetensors                          the last download of the client

The counter orders the versions, rather than file times: the clock of a device may be set back.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from coterie.core import tree
from coterie.runs.checkpoint_files import Damaged, read, write
from coterie.runs.model_files import plain

log = logging.getLogger("coterie")
DIGITS = 12  # of the counter in a file's name
KEPT = 3  # versions per client: before and after the last training, and one for a server that lost a round


def federation_folder(folder: Path, federation: str) -> Path:
    """Where a device keeps what belongs to this federation, below its own folder."""
    return folder / federation[:16]


class Store:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.last: dict[int, tuple[str, Any]] = {}  # client -> its latest version and state, in memory

    def save(self, client: int, version: str, state: Any) -> None:
        """Write a state durably, and delete old versions."""
        folder = self._folder(client)
        folder.mkdir(parents=True, exist_ok=True)
        stale = self._files(client, version)
        write(self._next(client, version), plain(tree.flatten(state)), {"version": version})
        self.last[client] = version, state
        for path in [*stale, *self._files(client)[:-KEPT]]:
            path.unlink(missing_ok=True)

    def load(self, client: int, version: str) -> tree.Tree | None:
        """The tensors of this version of the client's state; None if it is not stored."""
        for path in reversed(self._files(client, version)):
            try:
                tensors, about = read(path)
            except Damaged as damage:
                log.warning("%s", damage)
                continue
            if about["version"] == version:
                path.rename(self._next(client, version))  # in use: make it the newest, so that it is kept
                return tensors
        return None

    def save_down(self, client: int, version: str, down: tree.Tree) -> None:
        """Store the client's last download; with this version of its state it forms the personal model."""
        self._folder(client).mkdir(parents=True, exist_ok=True)
        write(self._folder(client) / "down.safetensors", plain(down), {"version": version})

    def load_down(self, client: int) -> tuple[str, tree.Tree] | None:
        try:
            down, about = read(self._folder(client) / "down.safetensors")
        except Damaged:
            return None
        return str(about["version"]), down

    def _folder(self, client: int) -> Path:
        return self.folder / f"client-{client}"

    def _files(self, client: int, version: str = "") -> list[Path]:
        """The state files of a client, oldest first; only those of one version, if given."""
        ending = f"{version[:32]}.safetensors" if version else "*.safetensors"
        return sorted(self._folder(client).glob(f"state-{'[0-9]' * DIGITS}-{ending}"))

    def _next(self, client: int, version: str) -> Path:
        files = self._files(client)
        count = int(files[-1].name.split("-")[1]) + 1 if files else 1
        return self._folder(client) / f"state-{count:0{DIGITS}}-{version[:32]}.safetensors"
