"""The states of all clients: one tree with the client axis in front.

It is on the GPU if it takes a small share of its memory, otherwise in host memory (page-locked if there is a GPU), or
in files if a folder is given. Only the rows of the clients that are being computed are on the device.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie.core import tree
from coterie.core.errors import CoterieError

SHARE = 1 / 16  # of the GPU's memory


class ClientMemory:
    """Client states, read and written by client id."""

    def __init__(self, num_clients: int, device: torch.device, folder: str | None = None) -> None:
        self.num_clients, self.device, self.folder = num_clients, device, folder
        self.kept: Any = ()  # (m, ...) the tree
        self.home: torch.device | None = None  # its device; None: there are no states yet

    def blank(self) -> ClientMemory:
        """An empty memory for the same clients."""
        return ClientMemory(self.num_clients, self.device, self.folder)

    def take(self, ids: Tensor) -> Any:
        """(S, ...) rows of these clients, on the device."""
        return tree.apply(lambda t: self._read(t, ids), self.kept)

    def keep(self, ids: Tensor, rows: Any) -> None:
        """Replace the states of these clients by rows (S, ...). The first call determines the form of all states."""
        if self.home is None:
            self.home = self._home(tree.size(rows) // len(ids) * self.num_clients)
            self.kept = tree.apply(self._room, rows)
        self.kept = tree.apply(lambda t, new: self._write(t, ids, new), self.kept, rows)

    def fetched(self, ids: Tensor) -> Any:
        """(S, ...) copies of the rows of these clients, on the CPU."""
        self._wait()
        return tree.apply(lambda t: t[ids.to(t.device)].cpu(), self.kept)

    def restore(self, ids: Tensor, rows: tree.Tree) -> None:
        """Replace the states of these clients by rows (S, ...), given by dotted name."""
        self.keep(ids, tree.fill(self.kept, rows))

    def settle(self) -> None:
        """Move the states off the device."""
        if self.home is not None and self.home.type != "cpu":
            self.home, self.kept = torch.device("cpu"), tree.apply(lambda t: t.cpu(), self.kept)

    @property
    def row_bytes(self) -> int:
        return tree.size(self.kept) // self.num_clients

    def __len__(self) -> int:
        return self.num_clients

    def __getitem__(self, client: int) -> Any:
        """A copy of the state of this client, on the CPU."""
        row = range(self.num_clients)[client]
        self._wait()
        return tree.apply(lambda t: t[row].to("cpu", copy=True), self.kept)

    def __setitem__(self, client: int, state: Any) -> None:
        self.keep(torch.tensor([client]), tree.stack([state]))

    def __iter__(self) -> Iterator[Any]:
        return (self[client] for client in range(self.num_clients))

    @property
    def _locked(self) -> bool:
        return self.device.type == "cuda" and self.home == torch.device("cpu") and self.folder is None

    def _wait(self) -> None:
        """Before the CPU reads: copies into page-locked memory may be under way."""
        if self._locked:
            torch.cuda.synchronize(self.device)

    def _home(self, size: int) -> torch.device:
        if self.folder is not None or self.device.type == "cpu":
            return torch.device("cpu")
        if self.device.type == "cuda" and size > SHARE * torch.cuda.get_device_properties(self.device).total_memory:
            return torch.device("cpu")
        return self.device

    def _room(self, rows: Tensor) -> Tensor:
        """Memory for all clients, with rows like these."""
        shape = (self.num_clients, *rows.shape[1:])
        if self.folder is not None:
            return in_file(shape, rows.dtype, self.folder)
        room = torch.zeros(shape, dtype=rows.dtype, device=self.home)
        return lock(room) if self._locked else room

    def _read(self, t: Tensor, ids: Tensor) -> Tensor:
        if not self._locked:
            return t[ids.to(t.device)].to(self.device)
        out = torch.empty((len(ids), *t.shape[1:]), dtype=t.dtype, device=self.device)
        for row, client in enumerate(ids.tolist()):
            out[row].copy_(t[client], non_blocking=True)
        return out

    def _write(self, t: Tensor, ids: Tensor, new: Tensor) -> Tensor:
        if t.ndim > 1 and new.shape[1] > t.shape[1]:  # one entry per sample, and this client has more samples
            more = self._room(new)
            self._wait()
            more[:, : t.shape[1]] = t
            t = more
        if t.ndim > 1:
            new = tree.longer(new, t.shape[1])
        if not self._locked:
            return t.index_copy_(0, ids.to(t.device), new.to(t.device))
        for row, client in enumerate(ids.tolist()):
            t[client].copy_(new[row], non_blocking=True)
        return t


def lock(t: Tensor) -> Tensor:
    """Page-lock this memory, so that copies to and from the GPU are asynchronous."""
    if t.numel():
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = int(runtime.cudaHostRegister(t.data_ptr(), t.numel() * t.element_size(), 0))
        if code:
            gigabytes = t.numel() * t.element_size() / 1e9
            raise CoterieError(
                f"{gigabytes:.1f} GB of client states cannot be page-locked (CUDA error {code}); "
                "is there memory left? --state-dir keeps it in files"
            )
        weakref.finalize(t, runtime.cudaHostUnregister, t.data_ptr())
    return t


def check_folder(folder: str) -> None:
    """Fail early if files cannot be created in this folder."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise CoterieError(f"cannot keep client states in the folder {folder}: {error.strerror}") from None


def in_file(shape: tuple[int, ...], dtype: torch.dtype, folder: str) -> Tensor:
    """Zeros in an unnamed file of this folder, which the system deletes whatever happens."""
    size = torch.Size(shape).numel()
    if not size:
        return torch.zeros(shape, dtype=dtype)
    count = size * dtype.itemsize
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        file, path = tempfile.mkstemp(prefix="clients-", dir=folder)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file, 0, count)  # fail early if the disk is full
            else:
                os.truncate(file, count)
            return torch.from_file(path, shared=True, size=size, dtype=dtype).view(shape)
        finally:
            os.close(file)
            os.unlink(path)
    except (OSError, RuntimeError) as error:  # torch only opens names that are UTF-8
        reason = error.strerror if isinstance(error, OSError) else error
        raise CoterieError(f"cannot keep {count / 1e9:.3f} GB in the folder {folder}: {reason}") from None
