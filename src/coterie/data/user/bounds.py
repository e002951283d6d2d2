"""Limits on the size of tables, checked before they are read."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from coterie.core.errors import CoterieError

MOST_COLUMNS = 200_000
MOST_LETTERS = 2**24  # in one row of a CSV file
MOST_JSON = 2**26  # bytes in a JSON file with metadata
DICTIONARY_BATCH = 2  # Arrow's message type


class Unusable(Exception):
    """A file that cannot be read; the others still can."""


class Bounded:
    """Iterate over the lines of a file, with a limit on the characters in one row."""

    def __init__(self, file: TextIO) -> None:
        self.file, self.letters = file, 0  # in the current row

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self.file.readline(MOST_LETTERS - self.letters + 1)
        self.letters += len(line)
        if self.letters > MOST_LETTERS:
            raise Unusable(f"a row has more than {MOST_LETTERS:,} characters")
        if not line:
            raise StopIteration
        return line


def check_width(columns: int) -> None:
    if columns > MOST_COLUMNS:
        raise Unusable(f"{columns:,} columns; a table may have at most {MOST_COLUMNS:,}")


def small_text(path: Path) -> str:
    """Read a text file of limited size."""
    with path.open("rb") as file:
        content = file.read(MOST_JSON + 1)
    if len(content) > MOST_JSON:
        raise CoterieError(f"{path}: larger than {MOST_JSON // 2**20} MiB, the limit for metadata")
    return content.decode()


def decoded_size(metadata: Any) -> int:
    """Bytes of a Parquet file's columns in memory, from its footer.

    A few bytes in the file can encode millions of equal values. Text stays dictionary-encoded.
    """
    groups, columns = metadata.num_row_groups, metadata.num_columns
    chunks = [metadata.row_group(g).column(c) for g in range(groups) for c in range(columns)]
    for chunk in chunks:
        if "DELTA_BYTE_ARRAY" in chunk.encodings:  # stores differences between texts: no bound on their size
            raise Unusable(f"column '{chunk.path_in_schema}' has the encoding DELTA_BYTE_ARRAY; write it as PLAIN")
    values = sum(max(8 * chunk.num_values, chunk.total_uncompressed_size) for chunk in chunks)
    return int(max(values, 8 * metadata.num_rows * columns))


def is_compressed(message: bytes) -> bool:
    """Whether the buffers of an Arrow message are compressed; message: its metadata, a flatbuffer."""

    def field(table: int, number: int) -> int | None:
        """The position of a field of a table; None if it is not set."""
        vtable = table - struct.unpack_from("<i", message, table)[0]
        place = 4 + 2 * number
        if place >= struct.unpack_from("<H", message, vtable)[0]:
            return None
        offset = int(struct.unpack_from("<H", message, vtable + place)[0])
        return table + offset if offset else None

    def below(place: int) -> int:
        return place + int(struct.unpack_from("<I", message, place)[0])

    root = below(0)
    kind, header = field(root, 1), field(root, 2)
    if kind is None or header is None:
        return False
    batch = below(header)
    if message[kind] == DICTIONARY_BATCH:
        inner = field(batch, 1)
        if inner is None:
            return False
        batch = below(inner)
    return message[kind] in (DICTIONARY_BATCH, DICTIONARY_BATCH + 1) and field(batch, 3) is not None
