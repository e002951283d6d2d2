"""A page that shows runs while they go on, for a browser on this machine."""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from coterie.core.errors import CoterieError
from coterie.federation import Round
from coterie.federation.folder import measures
from coterie.reports.elements import listed, paragraph
from coterie.reports.markup import Markup, join, tag
from coterie.reports.page import document
from coterie.reports.reading import Measures, Run, add_row
from coterie.reports.sections.accuracy import accuracy

HOST = "127.0.0.1"
PATIENCE = 2.0  # seconds that a page which asks for news has to fetch the last of them


class LivePage:
    """Served from entering to leaving; `begin` says what is run, and a call adds a round to it."""

    def __init__(self, port: int) -> None:
        if not 0 <= port <= 65535:
            raise CoterieError(f"a port is a number from 0 to 65535, not {port}")
        try:
            self.server = ThreadingHTTPServer((HOST, port), self._handler())
        except OSError as error:
            raise CoterieError(
                f"the page cannot be served at {HOST}:{port} ({error.strerror}); choose another port"
            ) from None
        self.address = f"http://{HOST}:{self.server.server_port}/"
        self.lock = threading.Lock()
        self.runs: list[tuple[Run, dict[int, Measures]]] = []
        self.version, self.fetched, self.asked, self.ended = 0, 0, 0.0, False

    def __enter__(self) -> LivePage:
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *reason: Any) -> None:
        with self.lock:
            self.ended, self.version = True, self.version + 1
        while self.fetched < self.version and time.monotonic() - self.asked < PATIENCE:
            time.sleep(0.05)
        self.server.shutdown()
        self.server.server_close()

    def begin(self, title: str, rounds: int, seed: int) -> None:
        """What follows is of this training."""
        config = {"method": {"name": title}, "federation": {"rounds": rounds, "seed": seed}}
        with self.lock:
            kept: dict[int, Measures] = {}
            self.runs.append((Run(Path(f"{title}-seed{seed}"), config, kept), kept))
            self.version += 1

    def __call__(self, record: Round) -> None:
        with self.lock:
            add_row(self.runs[-1][1], measures(record))
            self.version += 1

    def news(self) -> Markup:
        """What changes while the runs go on."""
        runs = [run for run, _ in self.runs]
        done = max(runs[-1].rounds, default=0) if runs else 0
        where = f"{runs[-1].method}: round {done} of {runs[-1].planned}" if runs else "Nothing has begun yet"
        words = f"{where}. Ended: this page is no longer served." if self.ended else f"{where}."
        return join(tag("p", words, id="status", role="status", data_ended=self.ended), accuracy(runs))

    def whole(self) -> str:
        title = listed(list(dict.fromkeys(run.method for run, _ in self.runs))) or "Coterie"
        head = tag("header", tag("h1", title), paragraph("While it runs", class_="facts"))
        return document(title, join(head, tag("main", self.news(), data_live=True)), live=True)

    def answer(self, path: str, known: str | None) -> tuple[int, str, str]:
        """Status, version and body for a request; `known` is the version that the asker has."""
        with self.lock:
            version = f'"{self.version}"'
            if path == "/":
                return 200, version, self.whole()
            if path != "/news":
                return 404, version, "Not found"
            self.asked, self.fetched = time.monotonic(), self.version
            return (304, version, "") if known == version else (200, version, self.news())

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        page = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                port = page.server.server_port
                if self.headers.get("Host") not in (f"{HOST}:{port}", f"localhost:{port}"):  # a name that points here
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
                pass  # the terminal belongs to the run

        return Handler
