"""Copy run folders."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from coterie.core.errors import CoterieError
from coterie.runs.checksums import RunFiles
from coterie.runs.disk import check_tree, writing
from coterie.runs.model_files import ModelFiles


def copy_run(folder: Path, to: Path) -> Path:
    """Copy the folder of a finished run, and verify every file of the copy that has a checksum. Returns `to`.

    The copy appears whole or not at all.
    """
    if os.path.lexists(to):
        raise CoterieError(f"{to} exists already; name another folder, or remove it")
    if to.absolute().is_relative_to(folder.absolute()):
        raise CoterieError(f"{to} is inside the run's own folder; name another one")
    check_tree(folder)
    verify(folder)
    with writing(to):
        to.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f"{to.name}.", dir=to.parent) as temporary:
            copy = Path(temporary) / "run"
            for inside, _, names in os.walk(folder):
                place = copy / Path(inside).relative_to(folder)
                place.mkdir()
                for name in names:
                    shutil.copyfile(Path(inside, name), place / name, follow_symlinks=False)
            verify(copy)
            copy.rename(to)
    return to


def verify(folder: Path) -> None:
    files = RunFiles(folder)
    files.verify()
    ModelFiles(files).verify()
