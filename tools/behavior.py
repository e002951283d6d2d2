"""What `coterie methods` shows of the methods' behavior.

python -m tools.behavior     tries all methods, and writes it into the package
"""

from __future__ import annotations

import json

from coterie.analysis.behavior import tried
from coterie.analysis.catalogue import RECORDS
from coterie.methods import METHODS


def records() -> str:
    rows = [f"{json.dumps(name)}: {json.dumps(tried(kind())._asdict())}" for name, kind in METHODS.items()]
    return "{\n" + ",\n".join(rows) + "\n}\n"


if __name__ == "__main__":
    RECORDS.write_text(records(), encoding="utf-8")
