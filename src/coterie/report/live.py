"""A web page that shows runs in progress, served on this machine only."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from coterie.analysis.outcomes import place
from coterie.core.errors import CoterieError
from coterie.report.elements import grid, listed, paragraph, table
from coterie.report.markup import Markup, join, tag
from coterie.report.naming import entries, named
from coterie.report.page import document
from coterie.report.sections.rounds import over_rounds
from coterie.report.sections.summary import all_clients, duration
from coterie.report.seeds import grouped
from coterie.runs.finding import is_run, runs_below
from coterie.runs.following import FollowedRun

HOST = "127.0.0.1"
PATIENCE = 2.0  # seconds that an open page has to fetch the last update
PAUSE = 0.5  # seconds between two looks at the folders
HEADER = ("run", "state", "round", "time left", "score", "clients", "left out", "MB up", "MB down", "s per round")


class LivePage:
    """A web server, as a context manager. It reads the folders that it follows, and folders of runs in them."""

    def __init__(self, port: int, folders: Iterable[str | Path] = ()) -> None:
        if not 0 <= port <= 65535:
            raise CoterieError(f"port must be between 0 and 65535, got {port}")
        try:
            self.server = ThreadingHTTPServer((HOST, port), self._handler())
        except OSError as error:
            raise CoterieError(
                f"the page cannot be served at {HOST}:{port} ({error.strerror}); choose another port"
            ) from None
        self.address = f"http://{HOST}:{self.server.server_port}/"
        self.lock = threading.Lock()
        self.folders = list(map(Path, folders))
        self.found: dict[Path, FollowedRun] = {}
        self.looked, self.requested, self.ended, self.last_fetched = 0.0, 0.0, False, False

    def __enter__(self) -> LivePage:
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *reason: Any) -> None:
        with self.lock:
            self.ended, self.looked = True, 0.0
        while not self.last_fetched and time.monotonic() - self.requested < PATIENCE:
            time.sleep(0.05)
        self.server.shutdown()
        self.server.server_close()

    def follow(self, folder: Path) -> None:
        """Show the run in this folder, which may not exist yet."""
        with self.lock:
            self.folders.append(folder)

    def runs(self) -> list[FollowedRun]:
        """The runs in all folders, as their files are now."""
        if time.monotonic() - self.looked > PAUSE:
            there = [path for folder in self.folders for path in run_paths(folder)]
            self.found = {path: self.found.get(path) or FollowedRun(path) for path in dict.fromkeys(there)}
            for run in self.found.values():
                run.refresh()
            self.looked = time.monotonic()
        return sorted(self.found.values(), key=lambda run: (str(run.folder.parent), place(run.section("command"))))

    def news(self) -> Markup:
        """The part of the page that changes while runs are in progress."""
        runs = self.runs()
        words = f"{summary(runs)}{' Ended; this page is no longer served.' * self.ended}"
        parts = [tag("p", words, id="status", role="status", data_ended=self.ended)]
        parts += [paragraph(f"{run.folder}: {run.problem}", class_="note") for run in runs if run.problem]
        shown = [run for run in runs if not run.problem]
        if shown:
            parts.append(status_table(shown))
        for metric in dict.fromkeys(run.metric for run in shown):  # charts have one axis
            same = [run for run in shown if run.metric == metric]
            parts += [grid([all_clients(grouped(same))]), over_rounds(same)]
        return join(*parts)

    def whole(self) -> str:
        names = list(dict.fromkeys(run.title for run in self.runs()))
        title = (listed(names) if len(names) <= 5 else f"{len(names)} methods") or "Coterie"
        head = tag("header", tag("h1", title), paragraph("Live, while it runs", class_="facts"))
        return document(title, join(head, tag("main", self.news(), data_live=True)), live=True)

    def answer(self, path: str, known: str | None) -> tuple[int, str, str]:
        """Status, version and body for a request. known: the version that the browser has."""
        with self.lock:
            if path == "/":
                return 200, "", self.whole()
            if path != "/news":
                return 404, "", "Not found"
            self.requested, ended = time.monotonic(), self.ended
            body = self.news()
            version = f'"{hashlib.sha256(body.encode()).hexdigest()[:16]}"'
            self.last_fetched = ended
            return (304, version, "") if known == version else (200, version, body)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        page = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                port = page.server.server_port
                if self.headers.get("Host") not in (f"{HOST}:{port}", f"localhost:{port}"):  # DNS rebinding
                    self.send_error(403)
                    return
                status, version, body = page.answer(self.path, self.headers.get("If-None-Match"))
                self.send_response(status)
                if version:
                    self.send_header("ETag", version)
                self.send_header("Content-Type", "text/html; charset=utf-8")
                self.send_header("Content-Length", str(len(body.encode())))
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, format: str, *args: Any) -> None:
                pass  # keep the terminal for the run

        return Handler


def run_paths(folder: Path) -> list[Path]:
    """The run in this folder, or the runs below it; none as long as there are none."""
    if not folder.is_dir():
        return []
    return [folder] if is_run(folder) else list(runs_below(folder))


def summary(runs: Sequence[FollowedRun]) -> str:
    """Such as: FedPAC: round 3 of 10. Or: 4 runs: 2 finished, 1 running, 1 stale."""
    if not runs:
        return "No run has started yet."
    if len(runs) == 1:
        return f"{runs[0].title}: round {runs[0].done} of {runs[0].planned}, {runs[0].state()}."
    states = [run.state() for run in runs]
    counts = [f"{states.count(state)} {state}" for state in ("finished", "running", "stale") if state in states]
    now = [f"{run.title}: round {run.done} of {run.planned}" for run in runs if run.state() == "running"]
    return f"{len(runs)} runs: {', '.join(counts)}. {'; '.join(now[:3])}{'.' * bool(now)}"


def status_table(runs: Sequence[FollowedRun]) -> Markup:
    """One line for each run: how far it is, its clients, scores, traffic and the time that is left."""
    names = [name for _, name in named(runs)]
    made = table("Progress", HEADER, [status_row(run, name) for run, name in zip(runs, names, strict=True)])
    metric = runs[0].metric
    about = (
        f"Score: mean {metric.words} over clients, lowest to highest. Left out: clients without a usable answer in the "
        "last round (in all rounds, with the number of rounds). Stale: no new round for a minute, and for five times "
        "as long as the slowest recent round."
    )
    return join(made, paragraph(about, class_="small"))


def status_row(run: FollowedRun, name: str) -> list[str]:
    last, state, seconds = run.rounds.get(max(run.rounds, default=0), {}), run.state(), run.seconds
    quiet = f" for {duration(max(time.time() - run.changed, 0))}" * (state == "stale")
    ever = ", ".join(f"{client}: {rounds}" for client, rounds in run.left_out.most_common(3))
    left = run.seconds_left if state == "running" else None
    return [
        name,
        f"{state}{quiet}",
        f"{run.done} of {run.planned}",
        "" if left is None else duration(left),
        scores_text(run),
        f"{last.get('participants', 0):.0f}",
        f"{', '.join(run.left_out_now) or 'none'}{f' ({ever})' * bool(ever)}",
        *(f"{run.total(column) / 1e6:.1f}" for column in ("bytes_up", "bytes_down")),
        f"{sum(seconds) / len(seconds):.2f}" if seconds else "",
    ]


def scores_text(run: FollowedRun) -> str:
    """Such as: 81.2 (64.0 to 93.1), of the number that the method reports."""
    point = next((e.point for e in entries([run]) if run.last_scores.get(e.point)), "")
    if not point:
        return ""
    values, written = [run.metric.factor * score.value for score in run.last_scores[point]], run.metric.written
    mean = sum(values) / len(values)
    return f"{written(mean, 1)} ({written(min(values), 1)} to {written(max(values), 1)})"
