"""A web page that shows runs in progress, served on this machine only."""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from coterie.core.errors import CoterieError
from coterie.federation import Round
from coterie.report.elements import listed, paragraph
from coterie.report.markup import Markup, join, tag
from coterie.report.page import document
from coterie.report.sections.rounds import over_rounds
from coterie.runs.run import Run
from coterie.runs.tables import ClientTable, Measures, add_row, measures

HOST = "127.0.0.1"
PATIENCE = 2.0  # seconds that an open page has to fetch the last update


class LiveRun(Run):
    """A run in progress, with its tables in memory instead of in a folder."""

    def __init__(self, title: str, rounds: int, seed: int) -> None:
        super().__init__(f"{title}-seed{seed}")
        self.config = {"method": {"name": title}, "federation": {"rounds": rounds, "seed": seed}}
        self.rounds: dict[int, Measures] = {}
        self.client_table, self.result = ClientTable({}, {}, {}), None


class LivePage:
    """A web server, as a context manager. `begin` adds a run, and calling the page adds a round to it."""

    def __init__(self, port: int) -> None:
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
        self.runs: list[LiveRun] = []
        self.version, self.fetched, self.requested, self.ended = 0, 0, 0.0, False

    def __enter__(self) -> LivePage:
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *reason: Any) -> None:
        with self.lock:
            self.ended, self.version = True, self.version + 1
        while self.fetched < self.version and time.monotonic() - self.requested < PATIENCE:
            time.sleep(0.05)
        self.server.shutdown()
        self.server.server_close()

    def begin(self, title: str, rounds: int, seed: int) -> None:
        """Add a run; the following rounds belong to it."""
        with self.lock:
            self.runs.append(LiveRun(title, rounds, seed))
            self.version += 1

    def __call__(self, record: Round) -> None:
        with self.lock:
            self.runs[-1].metric = record.metric
            add_row(self.runs[-1].rounds, measures(record))
            self.version += 1

    def news(self) -> Markup:
        """The part of the page that changes while runs are in progress."""
        runs = self.runs
        done = max(runs[-1].rounds, default=0) if runs else 0
        where = f"{runs[-1].title}: round {done} of {runs[-1].planned}" if runs else "No run has started yet"
        words = f"{where}. Ended; this page is no longer served." if self.ended else f"{where}."
        return join(tag("p", words, id="status", role="status", data_ended=self.ended), over_rounds(runs))

    def whole(self) -> str:
        title = listed(list(dict.fromkeys(run.title for run in self.runs))) or "Coterie"
        head = tag("header", tag("h1", title), paragraph("Live, while it runs", class_="facts"))
        return document(title, join(head, tag("main", self.news(), data_live=True)), live=True)

    def answer(self, path: str, known: str | None) -> tuple[int, str, str]:
        """Status, version and body for a request. known: the version that the browser has."""
        with self.lock:
            version = f'"{self.version}"'
            if path == "/":
                return 200, version, self.whole()
            if path != "/news":
                return 404, version, "Not found"
            self.requested, self.fetched = time.monotonic(), self.version
            return (304, version, "") if known == version else (200, version, self.news())

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
                self.send_header("ETag", version)
                self.send_header("Content-Type", "text/html; charset=utf-8")
                self.send_header("Content-Length", str(len(body.encode())))
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, format: str, *args: Any) -> None:
                pass  # keep the terminal for the run

        return Handler
