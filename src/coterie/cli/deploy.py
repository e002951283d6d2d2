"""Commands for federations of real machines: serve, join, certs, flower, keys."""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

from coterie.cli.flags import (
    METHOD_HELP,
    MakeCommand,
    add_flags,
    add_model_args,
    add_train_only,
    add_watch,
    asked_for,
    given,
    model_args,
    run_settings,
)

if TYPE_CHECKING:
    from coterie.federation import Round


def add_commands(command: MakeCommand, argv: list[str]) -> None:
    serve = command("serve", do_serve, "run the server of a federation")
    serve.add_argument("method", metavar="METHOD", help=METHOD_HELP)
    join = command("join", do_join, "join a federation as a device with one or several clients")
    certs = command("certs", do_certs, "make certificates for a broker, the server and devices, to try out TLS")
    certs.add_argument("folder", metavar="FOLDER", help="folder for the certificates; keep all but *.pem secret")
    certs.add_argument("--devices", metavar="NAME", nargs="+", default=[], help="names of the devices")
    certs.add_argument("--name", default="federation", help="federation whose topics they may use; default: federation")
    certs.add_argument("--host", default="127.0.0.1", help="name or address of the broker; default: 127.0.0.1")
    certs.add_argument("--port", type=int, default=8883, help="port of the broker; default: 8883")
    certs.add_argument("--days", type=int, default=365, help="days that the certificates are valid; default: 365")
    flower = command("flower", do_flower, "write an app that runs a method on Flower, with `flwr run`")
    flower.add_argument("folder", metavar="FOLDER", help="a new folder for the app")
    flower.add_argument("method", metavar="METHOD", help=METHOD_HELP)
    keys = command("keys", do_keys, "make the pair of keys that encrypted training needs")
    keys.add_argument("folder", metavar="FOLDER", help="folder for secret.ckks and public.ckks")
    if asked_for(argv, "serve"):
        add_serve_flags(serve, argv[1:])
    if asked_for(argv, "flower"):
        add_flower_flags(flower, argv[1:])
    if asked_for(argv, "join"):
        add_join_flags(join)


def add_serve_flags(parser: argparse.ArgumentParser, argv: list[str]) -> None:
    from coterie.deploy.transports.mqtt import Broker

    add_watch(parser)
    parser.add_argument("--json", action="store_true", help="print only the result, as JSON")
    add_flags(parser, "broker", Broker)
    add_flower_flags(parser, argv)


def add_flower_flags(parser: argparse.ArgumentParser, argv: list[str]) -> None:
    """Flags of a federation, whatever its transport."""
    from coterie.api import DataSettings
    from coterie.api.protocols import presets
    from coterie.cli.train import add_method_flags
    from coterie.core.training import LocalTraining
    from coterie.deploy.pending import Timeouts
    from coterie.deploy.server import Service
    from coterie.federation import Safety, Settings
    from coterie.privacy import Protection
    from coterie.privacy.encryption import Encryption

    parser.add_argument("--out", metavar="FOLDER", help="a new folder for the run")
    parser.add_argument("--resume", action="store_true", help="continue the run in --out, if there is one")
    parser.add_argument(
        "--model",
        help="cnn, convnet, conv4, ..., or package.module:Class, known to the devices too; default: set by --protocol",
    )
    add_model_args(parser)
    parser.add_argument("--head", metavar="NAME", help="name of the model's head; default: the last layer that runs")
    add_train_only(parser)
    parser.add_argument(
        "--task",
        metavar="package.module:Class",
        help="the devices' task, if it is not built in",
    )
    parser.add_argument(
        "--protocol", default="pac", help="paper whose settings are the defaults: pac, reg, crc or akd; default: pac"
    )
    add_flags(parser, "service", Service)  # no presets: its number of clients is not the protocol's
    groups = {"timeouts": Timeouts, "local training": LocalTraining, "federation": Settings, "safety": Safety}
    for title, kind in {**groups, "protection": Protection, "encryption": Encryption}.items():
        add_flags(parser, title, kind, presets=presets(DataSettings.dataset))
    add_method_flags(parser, argv)


def add_join_flags(parser: argparse.ArgumentParser) -> None:
    from coterie.api import DataSettings
    from coterie.api.protocols import presets
    from coterie.deploy.transports.mqtt import Broker

    parser.add_argument("--name", default="federation", help="name of the federation; default: federation")
    parser.add_argument("--device", default=socket.gethostname(), help="name of this device; default: the host name")
    parser.add_argument(
        "--clients", "--client", metavar="3|0-2,5", required=True,
        help="numbers of the clients on this device; with a built-in dataset, those of its partition",
    )  # fmt: skip
    parser.add_argument(
        "--dir",
        metavar="FOLDER",
        default="coterie-device",
        help="folder for this device's state; default: coterie-device",
    )
    parser.add_argument("--model", metavar="package.module:Class", help="the network, if it is not built in")
    add_model_args(parser)
    parser.add_argument("--method", metavar="package.module:Class", help="the method, if it is not built in")
    parser.add_argument(
        "--keys", metavar="FOLDER", help="folder of keys: weights leave this device only if encrypted with them"
    )
    parser.add_argument(
        "--tell-classes", action="store_true", help="report the number of samples of each class to the server"
    )
    parser.add_argument(
        "--tell-scores", action="store_true",
        help="with --dp sample: report accuracy and loss on the test samples, without noise",
    )  # fmt: skip
    parser.add_argument(
        "--max-epsilon", type=float, metavar="ε",
        help="stop before the privacy cost of a client's samples exceeds this ε, over all federations of --dir",
    )  # fmt: skip
    parser.add_argument(
        "--delta", type=float, metavar="δ", help="δ at which ε is counted on this device; default: 1e-5"
    )
    add_flags(parser, "broker", Broker)
    add_flags(parser, "data", DataSettings, presets=presets(DataSettings.dataset))


def do_serve(chosen: argparse.Namespace) -> None:
    from coterie.api.progress import round_line
    from coterie.cli.training import live_page
    from coterie.core.metric_scale import ACCURACY_SCALE
    from coterie.deploy.pending import Timeouts
    from coterie.deploy.server import Service, serve
    from coterie.deploy.transports.mqtt import Broker
    from coterie.federation.history import worst_tenth_text
    from coterie.runs.finding import new_folder

    settings = run_settings(chosen, chosen.method)
    quiet = hasattr(chosen, "json")
    out = Path(getattr(chosen, "out", None) or new_folder(f"{chosen.method}-served"))
    show = (lambda line: None) if quiet else say
    start = time.monotonic()
    with live_page(chosen) as page:
        if page:
            page.follow(out)

        def watch(record: Round) -> None:
            show(round_line(record, time.monotonic() - start))

        result = serve(
            chosen.method,
            Service(**given(chosen, Service)),
            Broker(**given(chosen, Broker)),
            model=getattr(chosen, "model", None),
            head=getattr(chosen, "head", None),
            model_args=model_args(chosen),
            train_only=getattr(chosen, "train_only", None),
            task=getattr(chosen, "task", None),
            protocol=chosen.protocol,
            timeouts=Timeouts(**given(chosen, Timeouts)),
            out=out,
            resume=hasattr(chosen, "resume"),
            watch=watch,
            show=show,
            **settings,
        )
    outcomes = [
        {"name": o.name, "measured": o.point, **o.last._asdict(), "clients": result.history.tested(o.point)}
        for o in result.outcomes()
    ]
    if quiet:
        print(json.dumps({"folder": str(out), "outcomes": outcomes}, indent=2))
    for outcome in [] if quiet else outcomes:
        if math.isnan(outcome["mean"]):
            say(f"{outcome['name']}: no device sent scores; with --dp sample, devices need --tell-scores")
            continue
        few = worst_tenth_text([outcome["clients"]])
        mean, worst = (result.metric.number(outcome[name]) for name in ("mean", "worst10"))
        what = "" if result.metric == ACCURACY_SCALE else f" {result.metric.words}"
        say(f"{outcome['name']}: {mean}{what} (mean over clients), worst 10 % ({few}) {worst}")
    show(f"Results are in {out}; the clients' models are on their devices")


def say(line: str) -> None:
    print(line, flush=True)


def do_join(chosen: argparse.Namespace) -> None:
    from coterie.api import DataSettings
    from coterie.deploy.device_data import load_hosted_clients
    from coterie.deploy.device_setup import DevicePolicy, exact_statistics
    from coterie.deploy.privacy_record import DELTA
    from coterie.deploy.transports.mqtt import Broker, MqttDevice

    settings, tell_classes = DataSettings(**given(chosen, DataSettings)), hasattr(chosen, "tell_classes")
    ids, data = load_hosted_clients(chosen.clients, settings)
    policy = DevicePolicy(
        Path(chosen.dir),
        getattr(chosen, "model", None),
        getattr(chosen, "keys", None),
        getattr(chosen, "max_epsilon", None),
        getattr(chosen, "delta", DELTA),
        hasattr(chosen, "tell_scores"),
        exact_statistics(settings, data, tell_classes),
        getattr(chosen, "method", None),
        model_args(chosen),
        type(data.task),
    )
    broker = Broker(**given(chosen, Broker))
    saved = MqttDevice(broker, chosen.name, chosen.device, data, ids, policy, say, tell_classes).run()
    if saved:
        say(f"the federation has ended; the models of clients {', '.join(map(str, ids))} are in {saved}")
        say(f"use them with: coterie predict {saved} --client {ids[0]} ...")


def do_flower(chosen: argparse.Namespace) -> None:
    from coterie.deploy.transports.flower import write_app

    asked = {name: value for name, value in vars(chosen).items() if name not in ("act", "command", "folder", "method")}
    for path in write_app(Path(chosen.folder), chosen.method, asked):
        print(path)


def do_certs(chosen: argparse.Namespace) -> None:
    from coterie.core.errors import CoterieError
    from coterie.deploy.certs import make_certificates

    if chosen.days < 1 or not 0 < chosen.port < 65536:
        raise CoterieError("--days must be at least 1, and --port between 1 and 65535")
    for path in make_certificates(
        Path(chosen.folder), chosen.devices, chosen.host, chosen.port, chosen.days, chosen.name
    ):
        print(os.path.relpath(path) if not Path(chosen.folder).is_absolute() else path)


def do_keys(chosen: argparse.Namespace) -> None:
    from coterie.privacy.keys import PUBLIC, SECRET, make_keys

    make_keys(chosen.folder)
    print(f"{chosen.folder}/{SECRET}: give it to the clients only: it decrypts all their models")
    print(f"{chosen.folder}/{PUBLIC}: for the server")
