"""Errors in code that users bring, shown with the lines of the user's files only."""

from __future__ import annotations

import os
import site
import sysconfig
import traceback
from pathlib import Path
from types import TracebackType

from coterie.core.errors import CoterieError

OURS = str(Path(__file__).resolve().parents[1]) + os.sep
LIBRARIES = tuple({
    path + os.sep
    for path in (*(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
                 *site.getsitepackages(), site.getusersitepackages())
})  # fmt: skip


def failure(what: str, error: BaseException) -> CoterieError:
    """The error to raise for an exception in a user's code: one line, and as notes the user's lines that led to it."""
    said = str(error).strip().splitlines()
    first = f"{what}: {type(error).__name__}{f': {said[0]}' if said else ''}"
    found = CoterieError(first)
    for line in users_lines(error):
        found.add_note(line)
    return found


def users_lines(error: BaseException) -> list[str]:
    """Where the exception passed through files that are neither Coterie's nor of an installed library."""
    trace: TracebackType | None = error.__traceback__
    if isinstance(error, SyntaxError) and error.filename and is_users(error.filename):
        return [f'  File "{error.filename}", line {error.lineno}', f"    {(error.text or '').strip()}"]
    frames = [frame for frame in traceback.extract_tb(trace) if is_users(frame.filename)]
    return [
        line
        for frame in frames
        for line in (f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}', f"    {frame.line}")
    ]


def is_users(file: str) -> bool:
    """Whether a file is the user's own: not Coterie's, not the interpreter's, not of an installed package."""
    if file.startswith("<"):
        return False
    path = os.path.abspath(file)
    return not path.startswith((OURS, *LIBRARIES)) and os.path.basename(path) not in ("coterie", "pytest")
