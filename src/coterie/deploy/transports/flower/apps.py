"""Coterie as a Flower app: a ServerApp that runs the rounds, and a ClientApp that answers requests."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from coterie.api.progress import round_line
from coterie.core.errors import CoterieError
from coterie.deploy.server import run_federation
from coterie.deploy.transports.flower.connection import (
    KINDS,
    FlowerConnection,
    Packet,
    error_packet,
    library,
    pack,
    unpack,
)
from coterie.deploy.transports.flower.device import device_from_config
from coterie.deploy.transports.flower.options import read_run_config
from coterie.deploy.transports.flower.server import FlowerTransport
from coterie.deploy.wire import Refused
from coterie.execution.process import one_thread
from coterie.federation import Round
from coterie.runs.finding import new_folder

log = logging.getLogger("coterie")


def server_app() -> Any:
    """A ServerApp with the settings of the run config. Invalid settings are logged in one line, and the run fails."""
    app = library().serverapp.ServerApp()

    @app.main()  # type: ignore[untyped-decorator]
    def main(grid: Any, context: Any) -> None:
        log_to_flower()
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
    settings = read_run_config(config)
    one_thread()
    out = Path(settings.out or new_folder(f"{settings.method}-flower")).resolve()
    start = time.monotonic()

    def watch(record: Round) -> None:
        log.info("%s", round_line(record, time.monotonic() - start))

    result = run_federation(
        settings.method,
        settings.service,
        partial(FlowerTransport, FlowerConnection(grid)),
        model=settings.model,
        head=settings.head,
        train_only=settings.train_only,
        task=settings.task,
        protocol=settings.protocol,
        timeouts=settings.timeouts,
        out=out,
        resume=settings.resume,
        watch=watch,
        **settings.settings,
    )
    for outcome in result.outcomes():
        shown = result.metric.number(outcome.last.mean)
        log.info("%s: %s %s (mean over clients)", outcome.name, shown, result.metric.words)
    log.info("results are in %s; the clients' models are on their devices", out)


def client_app() -> Any:
    """A ClientApp for the clients and data of the node config."""
    app = library().clientapp.ClientApp()
    for kind, name in KINDS.items():
        category, _, action = name.partition(".")
        getattr(app, category)(action)(answer_to(kind))
    return app


def answer_to(kind: str) -> Callable[[Any, Any], Any]:
    def answer(message: Any, context: Any) -> Any:
        log_to_flower()
        return library().app.Message(pack(reply(kind, context.node_config, message.content)), reply_to=message)

    return answer


def reply(kind: str, config: Mapping[str, Any], content: Any) -> Packet:
    try:
        return device_from_config(config).answer(kind, unpack(content))
    except (CoterieError, Refused) as error:
        log.error("coterie: %s", error)
        return error_packet(str(error))


def log_to_flower() -> None:
    if not log.handlers:
        log.handlers.extend(logging.getLogger("flwr").handlers)
        log.setLevel(logging.INFO)
