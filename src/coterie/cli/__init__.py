"""The command line. Flags are made from the fields of the dataclasses they set."""

from __future__ import annotations

import argparse
import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin take the core from those that work


def main(argv: Sequence[str] | None = None) -> None:
    from coterie.core.errors import CoterieError, out_of_memory

    open_streams()
    screen = logging.StreamHandler()
    logging.getLogger("coterie").addHandler(screen)
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, interrupt)
    try:
        sys.path.insert(0, current_folder())  # so that --model module:Class finds what lies there
        parser = make_parser(list(sys.argv[1:] if argv is None else argv))
        chosen = parser.parse_args(argv)
        chosen.act(chosen)
    except CoterieError as error:
        leave(str(error), 2)
    except KeyboardInterrupt as stop:
        leave(str(stop) or "stopped", 128 + getattr(stop, "signal", signal.SIGINT))
    except BrokenPipeError:
        sys.stderr.close()
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        leave("there is not enough memory for this; smaller numbers need less", 2)
    except OSError as error:  # of a file or folder that nobody thought of
        leave(f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error), 2)
    finally:
        logging.getLogger("coterie").removeHandler(screen)
        if signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, before)


def interrupt(number: int, frame: Any) -> None:
    """Ctrl-C. While torch or numpy are being imported they would make another error of it, or none."""
    for name in ("torch", "numpy"):
        if getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False):
            os.write(2, b"coterie: stopped\n")
            os._exit(130)
    signal.default_int_handler(number, frame)


def leave(reason: str, code: int) -> NoReturn:
    print(f"coterie: {reason}", file=sys.stderr)
    sys.exit(code)


def open_streams() -> None:
    """Something to print to, even where it was closed; names of files need not be text that a terminal can show."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def current_folder() -> str:
    from coterie.core.errors import CoterieError

    try:
        return os.getcwd()
    except OSError:
        raise CoterieError("the current folder is no more; call it from one that is there") from None


def make_parser(argv: list[str]) -> argparse.ArgumentParser:
    from coterie.cli import deploy, keys, lists, papers, personal, train, tune
    from coterie.version import VERSION

    parser = argparse.ArgumentParser(prog="coterie", description="Personalized federated learning.")
    parser.add_argument("--version", action="version", version=VERSION)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, act: Callable[[argparse.Namespace], None], help: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=help, description=help, argument_default=argparse.SUPPRESS)
        made.set_defaults(act=act)
        return made

    for group in (train, tune, lists, personal, papers, deploy, keys):
        group.add_commands(command, argv)
    return parser
