"""Text from elsewhere (names of classes, clients, columns, files) as it may be shown to a person."""

from __future__ import annotations

import json
import logging
from typing import Any


def printable(text: str, keep: str = "") -> str:
    r"""Control and bidirectional characters, and all others that cannot be seen, as JSON escapes: `\u001b`, `\u202e`.

    A terminal obeys the first kind, and the second changes what a line seems to say. keep: characters left as they are.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else json.dumps(c)[1:-1] for c in text)


class Escaping(logging.Formatter):
    """Log messages on one line each; tracebacks keep their lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return printable(super().formatException(ei), keep="\n")
