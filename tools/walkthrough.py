"""Makes docs/walkthrough.md and its pictures: every command is run, and what it prints is the picture.

python -m tools.walkthrough      about a minute; needs Chromium for the pictures of the report
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

DOCS = Path(__file__).parents[1] / "docs"
PAGE, PICTURES = DOCS / "walkthrough.md", DOCS / "pictures"
COLUMNS, MOST_LINES = 100, 34
PROGRESS = re.compile(r"(?P<title>\S.*?) [━╸╺ ]+ +\d+/\d+ \d+:\d\d:\d\d")
CHECK = "data check hospitals"


class Step(NamedTuple):
    picture: str
    command: str  # of coterie
    text: str
    shows: str  # what the picture must show


STEPS = (
    Step(
        "walk-data",
        CHECK,
        "Four hospitals have a table each. Before any training, a check says what Coterie understands of the files, "
        "and what is wrong with them: there are gaps.",
        "missing values",
    ),
    Step(
        "walk-run",
        "run fedrep --dataset hospitals --missing median --normalise auto --rounds 10 --out runs/fedrep",
        "With gaps filled by the median, the hospitals learn together. The first lines of a run say what was "
        "understood and what will be sent; the last ones, what came out.",
        "runs/fedrep",
    ),
    Step(
        "walk-models",
        "models runs/fedrep",
        "Each hospital has a model of its own, tested on its own patients.",
        "switzerland",
    ),
    Step(
        "walk-compare",
        "compare local fedavg fedrep --dataset hospitals --missing median --normalise auto --rounds 10 "
        "--out runs/three",
        "Was it worth it? The same hospitals alone, with one model for all, and with personal models.",
        "FedRep",
    ),
    Step(
        "walk-predict",
        "predict runs/fedrep --client switzerland hospitals/test/switzerland.csv",
        "A personal model takes raw rows of a table, by the names of the columns.",
        "disease",
    ),
)
REPORT = "report runs/three --out report.html"
INTRODUCTION = """\
# Walkthrough

From four tables to a personal model for each hospital, in pictures. `python -m tools.walkthrough` runs the commands of
this page and makes the pictures from what they print.

```sh
coterie data export hospitals --dataset heart-disease   # example files; yours look the same
```
"""


def page() -> str:
    parts = [INTRODUCTION]
    for step in STEPS:
        shown = step.command
        block = "" if step.command == CHECK else f"```sh\ncoterie {shown}\n```\n\n"  # the check ends with an error
        parts.append(f"{step.text}\n\n{block}![coterie {shown}](pictures/{step.picture}.svg)\n")
    parts.append(
        "The report has every client, curves and tables in one file that works offline.\n\n"
        f"```sh\ncoterie {REPORT}\n```\n\n![The report of three methods](pictures/walk-report.png)\n"
    )
    return "\n".join(parts)


def printed(command: str, folder: Path) -> str:
    """What a command prints in a terminal, with colors. It must succeed; a check that finds gaps has exit code 1."""
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "FORCE_COLOR": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "coterie", *command.split()],
        cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    if done.returncode != (command == CHECK):
        raise SystemExit(f"coterie {command} ended with exit code {done.returncode}:\n{done.stdout}")
    return re.sub(r"[^\n]*\r", "", done.stdout)


def settled(lines: list[str]) -> list[str]:
    """Without the earlier states of a progress bar, which a terminal overwrites."""
    bars = [PROGRESS.match(Text.from_ansi(line).plain) for line in lines]
    last = {bar["title"]: number for number, bar in enumerate(bars) if bar}
    return [line for number, line in enumerate(lines) if not (bar := bars[number]) or last[bar["title"]] == number]


def svg(command: str, output: str) -> str:
    """A terminal with a command and the last lines that it printed."""
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    lines = settled(output.rstrip().splitlines())
    console.print(Text(f"$ coterie {command}", style="bold"))
    if len(lines) > MOST_LINES:
        console.print(Text("...", style="dim"))
    for line in lines[-MOST_LINES:]:
        console.print(Text.from_ansi(line))
    picture = console.export_svg(title="coterie", unique_id="coterie")
    picture = re.sub(r"<!--.*?-->\s*", "", picture, flags=re.S)
    return re.sub(r"\s*@font-face \{.*?\}", "", picture, flags=re.S)  # fonts of another host


def screenshot(html: Path, png: Path, profile: Path) -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        raise SystemExit("Chromium is not installed: apt-get install chromium")
    subprocess.run(
        [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}",
         "--window-size=1100,900", f"--screenshot={png}", html.as_uri()],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip


def main() -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        printed("data export hospitals --dataset heart-disease", folder)
        for step in STEPS:
            picture = svg(step.command, printed(step.command, folder))
            if step.shows not in re.sub(r"<[^>]+>|&#160;", " ", picture):
                raise SystemExit(f"coterie {step.command} does not show '{step.shows}'")
            (PICTURES / f"{step.picture}.svg").write_text(picture, encoding="utf-8")
        printed(REPORT, folder)
        screenshot(folder / "report.html", PICTURES / "walk-report.png", folder / "profile")
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
