"""A separate Python process without any of our settings; it answers every line of input with a line of JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import IO, Any, Self, cast

from coterie.core.errors import CoterieError


class Neighbour:
    """Runs a module of this folder in a separate process, as a context manager."""

    def __init__(self, module: str, *arguments: str) -> None:
        self.module, self.arguments = module, arguments

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", f"benchmarks.{self.module}", *self.arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.answer()  # wait until it is ready
        return self

    def __exit__(self, *reason: object) -> None:
        with self.process:  # closes its pipes and waits for it
            pass

    def ask(self) -> None:
        self._stdin.write("\n")
        self._stdin.flush()

    def answer(self) -> dict[str, Any]:
        line = cast("IO[str]", self.process.stdout).readline()
        if not line:
            raise CoterieError(f"the process of benchmarks.{self.module} ended; see its output above")
        return cast("dict[str, Any]", json.loads(line))

    @property
    def _stdin(self) -> IO[str]:
        return cast("IO[str]", self.process.stdin)


def serve(work: Callable[[], dict[str, Any]]) -> None:
    """The other end: answer every line of input."""
    print("{}", flush=True)
    for _ in sys.stdin:
        print(json.dumps(work()), flush=True)
