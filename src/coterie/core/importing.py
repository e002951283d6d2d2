"""Import code outside of Coterie, only by a name that the user gave.

The working directory is on sys.path while that module is imported, and not before or after.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from coterie.core.errors import CoterieError
from coterie.core.user_code import failure

log = logging.getLogger("coterie")
_sources: dict[str, None] = {}  # folders that were searched for named modules; worker processes search them too


def imported(what: str, path: str, folders: Sequence[str] = ()) -> Any:
    """The object that `package.module:Name` stands for.

    what: the kind of object, for messages. folders: where to look before the working directory.
    """
    module, _, attribute = path.partition(":")
    if module.endswith(".py"):
        named = f"{module.removesuffix('.py').replace(os.sep, '.')}:{attribute}"
        raise CoterieError(f"cannot import {what} '{path}': name the module and not its file, such as {named}")
    places = [*folders, os.getcwd()]
    try:
        with on_path(places):
            found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # the user's module may fail in any way
        raise failure(f"cannot import {what} '{path}'", error) from error
    _sources.update(dict.fromkeys(places))
    return found


@contextlib.contextmanager
def on_path(folders: Sequence[str]) -> Iterator[None]:
    """Search these folders first while the block runs, and not after it."""
    sys.path[:0] = folders
    importlib.invalidate_caches()
    try:
        yield
    finally:
        for folder in folders:
            with contextlib.suppress(ValueError):
                sys.path.remove(folder)


@contextlib.contextmanager
def workers_can_import() -> Iterator[None]:
    """Processes that start in this block find the modules that the user named."""
    with on_path([folder for folder in _sources if folder not in sys.path]):
        yield


def is_code(name: object) -> bool:
    """Whether a name stands for code outside Coterie: package.module:Name."""
    return isinstance(name, str) and ":" in name


def untrusted(folder: object, flag: str, name: str) -> CoterieError:
    return CoterieError(f"{folder} needs code outside Coterie ({name}): pass {flag} {name} if you trust it")


def trusted(what: str, name: str, command: object) -> None:
    """Import code that a run folder names, and say so. command: how the run began, with its working directory."""
    folder = command.get("cwd") if isinstance(command, dict) else None
    folders = [folder] if isinstance(folder, str) and os.path.isdir(folder) else []
    log.warning("trusting code that the run folder names: %s %s%s", what, name, f" from {folder}" if folders else "")
    imported(what, name, folders)
