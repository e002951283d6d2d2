"""Safetensors files whose bytes depend only on their content.

The safetensors library writes metadata in the order of a hash map, which differs from call to call. Here the names in
the header are sorted, so that equal tensors and metadata give equal bytes and equal checksums.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save, save_file

from coterie.core.tree import Tree

LENGTH = 8  # bytes at the start of a file: the length of the header, little-endian


def packed(tensors: Tree, metadata: Mapping[str, str]) -> bytes:
    """The content of a safetensors file."""
    content = save(tensors, dict(metadata))
    end = LENGTH + int.from_bytes(content[:LENGTH], "little")
    return content[:LENGTH] + ordered(content[LENGTH:end]) + content[end:]


def write_packed(path: Path, tensors: Tree, metadata: Mapping[str, str]) -> None:
    """Write the same to a file, without a copy of all tensors in memory."""
    path.touch()
    mode = path.stat().st_mode  # by the umask; save_file makes files for their owner only
    save_file(tensors, path, dict(metadata))
    path.chmod(mode)
    with path.open("r+b") as file:
        header = file.read(int.from_bytes(file.read(LENGTH), "little"))
        file.seek(LENGTH)
        file.write(ordered(header))


def ordered(header: bytes) -> bytes:
    """The JSON header with sorted names, padded to its old length."""
    text = json.dumps(json.loads(header), sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()
    if len(text) > len(header):
        raise ValueError("sorting made the header of a safetensors file longer")
    return text.ljust(len(header))
