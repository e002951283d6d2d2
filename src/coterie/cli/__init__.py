"""The command line. Flags are made from the fields of the dataclasses they set."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin take the core from those that work


def main(argv: Sequence[str] | None = None) -> None:
    from coterie.core.errors import CoterieError

    logging.getLogger("coterie").addHandler(logging.StreamHandler())
    sys.path.insert(0, os.getcwd())  # so that --model module:Class finds what lies in this folder
    try:
        parser = make_parser(list(sys.argv[1:] if argv is None else argv))
        chosen = parser.parse_args(argv)
        chosen.act(chosen)
    except CoterieError as error:
        print(f"coterie: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt as stop:
        print(f"coterie: {stop or 'stopped'}", file=sys.stderr)
        sys.exit(128 + getattr(stop, "signal", 2))
    except BrokenPipeError:
        sys.stderr.close()


def make_parser(argv: list[str]) -> argparse.ArgumentParser:
    from coterie.cli import deploy, lists, papers, personal, train, tune
    from coterie.version import VERSION

    parser = argparse.ArgumentParser(prog="coterie", description="Personalized federated learning.")
    parser.add_argument("--version", action="version", version=VERSION)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, act: Callable[[argparse.Namespace], None], help: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=help, description=help, argument_default=argparse.SUPPRESS)
        made.set_defaults(act=act)
        return made

    for group in (train, tune, lists, personal, papers, deploy):
        group.add_commands(command, argv)
    return parser
