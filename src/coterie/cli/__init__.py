"""The command line: commands, and flags made from dataclass fields."""

from __future__ import annotations

import argparse
import gc
import importlib
import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads would take cores from working ones

GROUPS: dict[str, dict[str, tuple[str, ...]]] = {  # of --help: module -> its commands
    "train": {"train": ("demo", "run", "compare"), "resume": ("resume",), "tune": ("tune",)},
    "inspect": {
        "methods": ("methods", "cite"),
        "lists": ("data", "privacy", "pictures"),
        "report": ("watch", "report", "plot", "table"),
    },
    "use models": {"personal": ("models", "predict", "evaluate", "export", "adapt")},
    "papers": {"papers": ("recipes", "reproduce"), "leaderboard": ("leaderboard",)},
    "deploy": {"deploy": ("serve", "join", "certs", "flower", "keys")},
}


def main(argv: Sequence[str] | None = None) -> None:
    from coterie.core.errors import CoterieError, out_of_memory
    from coterie.core.printable import Escaping
    from coterie.core.user_code import failure, users_lines

    open_streams()
    screen = logging.StreamHandler()
    screen.setFormatter(Escaping())
    logging.getLogger("coterie").addHandler(screen)
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, interrupt)
    try:
        check_current_folder()
        words = list(sys.argv[1:] if argv is None else argv)
        with without_collection():
            parser = make_parser(words)
        if not words:
            parser.exit(2, parser.format_help())
        chosen = parser.parse_args(words)
        chosen.act(chosen)
    except CoterieError as error:
        leave(str(error), 2, getattr(error, "__notes__", ()))
    except KeyboardInterrupt as stop:
        leave(str(stop) or "stopped", 128 + getattr(stop, "signal", signal.SIGINT))
    except BrokenPipeError:
        sys.stderr.close()
    except OSError as error:  # a file or folder that no other check covers
        leave(f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error), 2)
    except Exception as error:
        if out_of_memory(error):
            leave("out of memory; try fewer clients per cohort or a smaller batch", 2)
        if not users_lines(error):
            raise
        leave(str(failure("an error in your code", error)), 2, users_lines(error))
    finally:
        logging.getLogger("coterie").removeHandler(screen)
        if signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, before)


def interrupt(number: int, frame: Any) -> None:
    """Handle Ctrl-C. While torch or numpy are being imported, they would turn it into another error, or none."""
    for name in ("torch", "numpy"):
        if getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False):
            os.write(2, b"coterie: stopped\n")
            os._exit(130)
    signal.default_int_handler(number, frame)


def leave(reason: str, code: int, notes: Sequence[str] = ()) -> NoReturn:
    from coterie.core.printable import printable

    print(*map(printable, (f"coterie: {reason}", *notes)), sep="\n", file=sys.stderr)
    sys.exit(code)


def open_streams() -> None:
    """Open stdout and stderr where they are closed, and replace characters that a terminal cannot show."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def check_current_folder() -> None:
    from coterie.core.errors import CoterieError

    try:
        os.getcwd()
    except OSError:
        raise CoterieError("the working directory was deleted; change to another one") from None


@contextmanager
def without_collection() -> Iterator[None]:
    """Import torch without garbage collection, which would go through its modules again and again, now and later."""
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def make_parser(argv: list[str]) -> argparse.ArgumentParser:
    """The parser of these words. Only the module of their command is imported, or all for help and errors."""
    from coterie.cli.parser import Parser, ShortUsage
    from coterie.core.version import VERSION

    parser = Parser(
        prog="coterie",
        description="Personalized federated learning.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=VERSION)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    listed: list[tuple[str, str]] = []  # commands of the current group, and what they do

    def command(name: str, act: Callable[[argparse.Namespace], None], help: str) -> argparse.ArgumentParser:
        made = commands.add_parser(
            name, description=help, argument_default=argparse.SUPPRESS, formatter_class=ShortUsage
        )
        made.set_defaults(act=act)
        listed.append((name, help))
        return made

    asked = {module for modules in GROUPS.values() for module, names in modules.items() if argv and argv[0] in names}
    lines: list[str] = []
    for title, modules in GROUPS.items():
        listed.clear()
        for module in [name for name in modules if name in asked or not asked]:
            importlib.import_module(f"coterie.cli.{module}").add_commands(command, argv)
        lines += [f"{title}:", *(f"  {name:<12}{help}" for name, help in listed), ""]
    parser.epilog = "\n".join([*lines, "`coterie COMMAND --help` describes a command."])
    return parser
