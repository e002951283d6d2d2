"""W&B's offline file, read by its description: LevelDB's log format, with a Record in each entry.

A header of 7 bytes, then blocks of 32 KiB. In these, chunks: checksum (4 bytes), length (2), type (1: whole, 2: first,
3: middle, 4: last), content. A block ends in zeros where no chunk fits.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK = 32768
HEADER = 7


def entries(path: Path) -> Iterator[bytes]:
    content, at, parts = path.read_bytes(), HEADER, b""
    while at + HEADER <= len(content):
        left = BLOCK - at % BLOCK
        if left < HEADER:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        parts = (parts if kind in (3, 4) else b"") + content[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (1, 4):
            yield parts


def records(path: Path) -> Iterator[Any]:
    from wandb.proto import wandb_internal_pb2

    for entry in entries(path):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(entry)
        yield record
