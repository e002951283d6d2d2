"""The command that makes keys: keys."""

from __future__ import annotations

import argparse

from coterie.cli.flags import MakeCommand


def add_commands(command: MakeCommand, argv: list[str]) -> None:
    keys = command("keys", do_keys, "make the pair of keys that encrypted training needs")
    keys.add_argument("folder", metavar="FOLDER", help="folder for secret.ckks and public.ckks")


def do_keys(chosen: argparse.Namespace) -> None:
    from coterie.privacy.keys import PUBLIC, SECRET, make_keys

    make_keys(chosen.folder)
    print(f"{chosen.folder}/{SECRET}: give it to the clients only: it decrypts all their models")
    print(f"{chosen.folder}/{PUBLIC}: for the server")
