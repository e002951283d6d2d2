"""Run folders that a test has edited, with checksums as if the run had written them so."""

from __future__ import annotations

from pathlib import Path

from coterie.runs.checksums import CHECKSUMS, Checksum, to_json


def sign(folder: Path) -> Path:
    """Write checksums of what is in the folder now."""
    files = [path for path in folder.iterdir() if path.is_file() and not path.is_symlink()]
    sums = {path.name: Checksum.of(path.read_bytes()) for path in files if path.name not in (CHECKSUMS, "log.txt")}
    inner = folder / "models" / "models.sha256"
    if inner.is_file():
        sums["models/models.sha256"] = Checksum.of(inner.read_bytes())
    (folder / CHECKSUMS).write_text(to_json(sums), encoding="utf-8")
    return folder
