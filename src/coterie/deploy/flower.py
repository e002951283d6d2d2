"""Coterie's methods as a Flower app: a ServerApp that runs the rounds, and a ClientApp that answers letters."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from coterie.clients.flower import Flower
from coterie.clients.looped import one_thread
from coterie.core.errors import CoterieError
from coterie.deploy.node import node_of
from coterie.deploy.options import read_run
from coterie.deploy.server import conduct
from coterie.display import round_line
from coterie.federation import Round
from coterie.network.flower import KINDS, Line, Parcel, library, pack, trouble, unpack
from coterie.network.wire import Refused

log = logging.getLogger("coterie")


def server_app() -> Any:
    """Settings come from the run config. What is wrong with them is one line in the log, and the run has failed."""
    app = library().serverapp.ServerApp()

    @app.main()  # type: ignore[untyped-decorator]
    def main(grid: Any, context: Any) -> None:
        speak()
        try:
            run(grid, context.run_config)
        except CoterieError as error:
            log.error("coterie: %s", error)
            raise
        except KeyboardInterrupt as stop:
            log.error("coterie: %s", stop or "stopped")
            raise CoterieError(str(stop) or "stopped") from None

    return app


def run(grid: Any, config: Mapping[str, Any]) -> None:
    wanted = read_run(config)
    one_thread()
    out = Path(wanted.out or f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{wanted.method}-flower").resolve()
    start = time.monotonic()

    def watch(record: Round) -> None:
        log.info("%s", round_line(record, time.monotonic() - start))

    result = conduct(
        wanted.method,
        wanted.service,
        partial(Flower, Line(grid)),
        model=wanted.model,
        head=wanted.head,
        protocol=wanted.protocol,
        patience=wanted.patience,
        out=out,
        resume=wanted.resume,
        watch=watch,
        **wanted.settings,
    )
    for outcome in result.outcomes():
        log.info("%s: %.2f (mean over clients)", outcome.name, 100 * outcome.last.mean)
    log.info("everything but the clients' models, which are on their devices, is in %s", out)


def client_app() -> Any:
    """Which clients are here, and their data, come from the node config."""
    app = library().clientapp.ClientApp()
    for kind, name in KINDS.items():
        category, _, action = name.partition(".")
        getattr(app, category)(action)(answer_to(kind))
    return app


def answer_to(kind: str) -> Callable[[Any, Any], Any]:
    def answer(message: Any, context: Any) -> Any:
        speak()
        return library().app.Message(pack(reply(kind, context.node_config, message.content)), reply_to=message)

    return answer


def reply(kind: str, config: Mapping[str, Any], content: Any) -> Parcel:
    try:
        return node_of(config).answer(kind, unpack(content))
    except (CoterieError, Refused) as error:
        log.error("coterie: %s", error)
        return trouble(str(error))


def speak() -> None:
    """In Flower's log."""
    if not log.handlers:
        log.handlers.extend(logging.getLogger("flwr").handlers)
        log.setLevel(logging.INFO)
