"""Text from users' files (names of classes, clients, columns): safe to print, and as long as there is room."""

from __future__ import annotations

import json
import logging
from typing import Any


def printable(text: str, keep: str = "") -> str:
    r"""Replace control, bidirectional and other invisible characters by JSON escapes: `\u001b`, `\u202e`.

    Terminals execute control characters, and bidirectional ones reorder the text. keep: characters left as they are.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else json.dumps(c)[1:-1] for c in text)


def shortened(text: str, letters: int) -> str:
    """The text with at most so many letters; the last one is … where it was longer."""
    return text if len(text) <= letters else f"{text[: letters - 1]}…"


class Escaping(logging.Formatter):
    """Log messages on one line each; tracebacks keep their lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return printable(super().formatException(ei), keep="\n")
