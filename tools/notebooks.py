"""Execute the notebooks of examples/ and keep their outputs.

python -m tools.notebooks            all of them; writes them back with new outputs
python -m tools.notebooks first-steps
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"
SECONDS = 120  # for a cell


def notebooks() -> list[Path]:
    return sorted(FOLDER.glob("*.ipynb"))


def executed(path: Path, folder: Path) -> Any:
    """The notebook with the outputs of a run in this folder. Its first error is raised."""
    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # where `coterie` is
    before, os.environ["PATH"] = os.environ["PATH"], tools
    try:
        where = {"metadata": {"path": str(folder)}}
        client = NotebookClient(notebook, timeout=SECONDS, kernel_name="python3", resources=where)
        manager = client.create_kernel_manager()
        with TemporaryDirectory() as sockets:
            manager.transport, manager.ip = "ipc", f"{sockets}/kernel"  # files, no ports
            client.execute()
    finally:
        os.environ["PATH"] = before
    return tidy(notebook)


def tidy(notebook: Any) -> Any:
    """Without times, versions and addresses of objects, so that equal results are equal files."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        cell.metadata = {}
        for output in cell.get("outputs", []):
            for kind, content in output.get("data", {}).items():
                if kind.startswith("text/"):
                    output["data"][kind] = re.sub(r" at 0x[0-9a-f]+", "", content)
    return notebook


def main(names: Sequence[str]) -> None:
    for path in notebooks():
        if not names or path.stem in names:
            with TemporaryDirectory() as folder:
                done = executed(path, Path(folder))
            text = nbformat.writes(done, indent=1)  # type: ignore[no-untyped-call]
            path.write_text(f"{text}\n", encoding="utf-8")
            print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
