"""A parser whose errors are one line, with the command or flag that was probably meant."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

FEW_FLAGS = 8  # that a usage line lists
MOST_SUGGESTED = 3
CHOICES = re.compile(r"(invalid choice: '(.*)') \(choose from (.*)\)$", re.S)


class ShortUsage(argparse.HelpFormatter):
    """Usage lines on which [options] stands for the flags of commands that have many."""

    def add_usage(self, usage: str | None, actions: Iterable[argparse.Action], groups: Any, prefix: Any = None) -> None:
        needed = [action for action in actions if action.required or not action.option_strings]
        if len(list(actions)) > len(needed) + FEW_FLAGS:
            actions = [argparse.Action([], "options", metavar="[options]"), *needed]
        super().add_usage(usage, actions, groups, prefix)


class Parser(argparse.ArgumentParser):
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        chosen, rest = super().parse_known_args(args, namespace)
        if rest:
            unknown = next((word for word in rest if word.startswith("--")), "")
            near = self.flags_near(unknown.partition("=")[0])
            hint = f": did you mean {' or '.join(near)}?" if near else ""
            self.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
        return chosen, rest

    def flags_near(self, unknown: str) -> list[str]:
        """Flags that have these words in their name; else the one with a similar name; else flags about these words."""
        asked = unknown.strip("-")
        about = {
            name: str(action.help) for action in self._actions for name in action.option_strings if name[:2] == "--"
        }
        if not asked:
            return []
        return (
            [name for name in about if len(asked) > 3 and asked in name][:MOST_SUGGESTED]
            or difflib.get_close_matches(unknown, about, n=1, cutoff=0.75)
            or [name for name, text in about.items() if asked.replace("-", " ") in text][:MOST_SUGGESTED]
        )

    def error(self, message: str) -> NoReturn:
        found = CHOICES.search(message)
        near = nearest(found[2], re.findall(r"[\w-]+", found[3])) if found else []
        if found and near:
            message = f"{message[: found.start()]}{found[1]}: did you mean '{near[0]}'?"
        elif found and "COMMAND" in message:  # all are too many for a line
            message = message[: found.start()] + found[1]
        self.exit(2, f"{self.prog}: error: {message} (`{self.prog} --help` explains)\n")


def nearest(name: str, known: Sequence[str]) -> list[str]:
    return difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.6)
