"""The report: one self-contained HTML file that makes no requests and runs only its own script."""

from __future__ import annotations

import errno
import os
from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from importlib.resources import files
from pathlib import Path

from coterie.core.errors import CoterieError
from coterie.report import charts
from coterie.report.elements import listed
from coterie.report.markup import Markup, join, tag
from coterie.report.naming import dataset, entries
from coterie.report.sections.clients import clients
from coterie.report.sections.costs import costs
from coterie.report.sections.data import data
from coterie.report.sections.heads import head_weights
from coterie.report.sections.metrics import metrics
from coterie.report.sections.rounds import over_rounds
from coterie.report.sections.settings import configuration
from coterie.report.sections.summary import summary
from coterie.runs.disk import check_ours, whole
from coterie.runs.finding import open_runs
from coterie.runs.stored_run import StoredRun

MARK = '<meta name="generator" content="Coterie">'
PARTS = {
    "summary": (summary, "Summary"),
    "rounds": (over_rounds, "Rounds"),
    "clients": (clients, "Clients"),
    "metrics": (metrics, "Metrics"),
    "heads": (head_weights, "Head weights"),
    "data": (data, "Data"),
    "costs": (costs, "Communication and time"),
    "settings": (configuration, "What was run"),
}


def write_report(paths: Sequence[str | Path], out: str | Path) -> Path:
    """Write the report of these run folders atomically."""
    return write_page(report(open_runs(paths)), Path(out))


def write_page(content: str, path: Path) -> Path:
    """Write a page atomically. Files that Coterie did not write are not replaced."""
    try:
        check_ours(path, MARK.encode())
    except OSError as error:
        raise CoterieError(f"{path} cannot be read: {error.strerror}") from None
    return write_text(content, path)


def write_text(content: str, path: Path) -> Path:
    """Write a text atomically."""
    page = content.encode(errors="replace")  # file names need not be UTF-8
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if path.exists() and not path.is_file():  # a device or a pipe: write to it, do not replace it
            path.write_bytes(page)
            return path
        with whole(path, shared=True) as part:
            part.write_bytes(page)
    except OSError as error:
        raise CoterieError(f"{path} cannot be written: {error.strerror}") from None
    return path


def report(runs: Sequence[StoredRun]) -> str:
    """The page. All runs must have one metric: charts and tables show them together."""
    by = list(dict.fromkeys(run.metric.words for run in runs))
    if len(by) > 1:
        raise CoterieError(f"these runs are measured by different metrics ({', '.join(by)}); report each alone")
    made = {name: make(runs) for name, (make, _) in PARTS.items()}
    links = [tag("a", PARTS[name][1], href=f"#{name}") for name, part in made.items() if part]
    title = heading(runs)
    top = tag("header", tag("h1", title), tag("p", facts(runs), class_="facts"), tag("nav", *links, aria_label="Parts"))
    foot = tag("footer", tag("p", "Made by Coterie from run folders. Scores are on test samples."))
    skip = tag("a", "Skip to the report", href="#main", class_="skip")
    return document(title, join(skip, top, tag("main", *made.values(), id="main"), foot))


def heading(runs: Sequence[StoredRun]) -> str:
    """For example: FedPAC and Ditto on cifar10."""
    names = list(dict.fromkeys(e.label for e in entries(runs))) or [run.title for run in runs]
    datasets = list(dict.fromkeys(dataset(run)[0] for run in runs))
    many = f"{len(names)} methods" if len(names) < len(runs) else f"{len(runs)} runs"
    return f"{listed(names) if len(names) <= 5 else many} on {listed(datasets)}"


def facts(runs: Sequence[StoredRun]) -> str:
    """Facts that all runs share, in one line."""
    common: list[list[str]] = []
    for run in runs:
        federation, count = run.section("federation"), run.section("data").get("clients")
        words = [f"{count} clients"] if count else []
        words += [f"{run.planned} rounds"] if run.planned else []
        ratio = federation.get("join_ratio", 1)
        last = ", all clients in one more round at the end" if federation.get("full_last_round") is True else ""
        words += [f"{100 * ratio:g} % of clients a round{last}"] if isinstance(ratio, int | float) and ratio < 1 else []
        words += [f"seed {federation['seed']}"] if "seed" in federation else []
        words += [str(run.section("ran")["started"])[:10]] if "started" in run.section("ran") else []
        common.append(words)
    return " · ".join(word for word in common[0] if all(word in words for words in common))


def document(title: str, body: Markup, live: bool = False, more: str | None = None) -> str:
    """The whole page. live: it may request updates from its own server. more: name of additional style and script."""
    names = ["report"] if more is None else ["report", more]
    style = Markup(chart_style() + "".join(asset(f"{name}.css") for name in names))
    script = Markup("".join(asset(f"{name}.js") for name in names))
    policy = (
        f"default-src 'none'; style-src '{fingerprint(style)}'; script-src '{fingerprint(script)}'; img-src data:; "
        f"base-uri 'none'; form-action 'none'{'; connect-src ' + chr(39) + 'self' + chr(39) if live else ''}"
    )
    head = (
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        Markup(MARK),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("link", rel="icon", href="data:,"),  # or browsers request one
        tag("style", style),
    )
    tooltip = tag("div", id="tip", role="status", hidden=True)
    page = tag("html", tag("head", *head), tag("body", body, tooltip, tag("script", script)), lang="en")
    return f"<!doctype html>\n{page}\n"


def chart_style() -> str:
    """The style sheet of charts."""
    return charts.style(asset("charts.css"))


def asset(name: str) -> str:
    return files("coterie.report").joinpath(name).read_text(encoding="utf-8")


def fingerprint(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"
