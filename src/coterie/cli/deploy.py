"""Commands for a federation of real machines: serve, join, certs, flower."""

from __future__ import annotations

import argparse
import json
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

from coterie.cli.flags import MakeCommand, add_flags, add_watch, asked_for, given

if TYPE_CHECKING:
    from coterie.federation import Round


def add_commands(command: MakeCommand, argv: list[str]) -> None:
    serve = command("serve", do_serve, "be the server of a federation of devices")
    serve.add_argument("method", metavar="METHOD", help="`coterie methods` lists them")
    join = command("join", do_join, "be a device of a federation, with one or several clients")
    certs = command("certs", do_certs, "make certificates for a broker, the server and devices, to try TLS out")
    certs.add_argument("folder", metavar="FOLDER", help="where to; kept secret but for *.pem")
    certs.add_argument("--devices", metavar="NAME", nargs="+", default=[], help="names of the devices")
    certs.add_argument("--host", default="127.0.0.1", help="name or address of the broker (127.0.0.1)")
    certs.add_argument("--port", type=int, default=8883, help="its port (8883)")
    certs.add_argument("--days", type=int, default=365, help="days that certificates are valid (365)")
    flower = command("flower", do_flower, "write an app that runs a method on Flower, with `flwr run`")
    flower.add_argument("folder", metavar="FOLDER", help="where to; must not exist")
    flower.add_argument("method", metavar="METHOD", help="`coterie methods` lists them")
    if asked_for(argv, "serve"):
        add_serve_flags(serve, argv[1:])
    if asked_for(argv, "flower"):
        add_flower_flags(flower, argv[1:])
    if asked_for(argv, "join"):
        add_join_flags(join)


def add_serve_flags(parser: argparse.ArgumentParser, argv: list[str]) -> None:
    from coterie.network.mqtt import Broker

    add_watch(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON, and nothing else")
    add_flags(parser, "broker", Broker)
    add_flower_flags(parser, argv)


def add_flower_flags(parser: argparse.ArgumentParser, argv: list[str]) -> None:
    """Those of a federation, however its letters travel."""
    from coterie.api import DataSettings
    from coterie.cli.train import add_method_flags
    from coterie.clients.remote import Patience
    from coterie.core.local import Sgd
    from coterie.deploy.server import Service
    from coterie.federation import Safety, Settings
    from coterie.protection import Protection
    from coterie.protection.encryption import Encryption
    from coterie.protocols import presets

    parser.add_argument("--out", metavar="FOLDER", help="folder to leave the run in; must not exist")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out, if there is one")
    parser.add_argument("--model", help="model: cnn, convnet, conv4, ..., or package.module:Class, also on the devices")
    parser.add_argument("--head", metavar="NAME", help="name of the model's head, where it is not its last module")
    parser.add_argument("--protocol", default="pac", help="defaults as in a paper: pac, reg, crc or akd")
    add_flags(parser, "service", Service)  # whose number of clients no protocol knows
    for title, kind in (("patience", Patience), ("local training", Sgd), ("federation", Settings), ("safety", Safety),
                        ("protection", Protection), ("encryption", Encryption)):  # fmt: skip
        add_flags(parser, title, kind, presets=presets(DataSettings.dataset))
    add_method_flags(parser, argv)


def add_join_flags(parser: argparse.ArgumentParser) -> None:
    from coterie.api import DataSettings
    from coterie.network.mqtt import Broker
    from coterie.protocols import presets

    parser.add_argument("--name", default="federation", help="name of the federation (federation)")
    parser.add_argument("--device", default=socket.gethostname(), help="name of this device (that of the machine)")
    parser.add_argument(
        "--clients", metavar="3|0-2,5", required=True,
        help="numbers of the clients that are here; with a dataset of Coterie's, those of its partition",
    )  # fmt: skip
    parser.add_argument("--dir", metavar="FOLDER", default="coterie-device", help="what is kept here (coterie-device)")
    parser.add_argument("--model", metavar="package.module:Class", help="the network, where it is not Coterie's own")
    parser.add_argument(
        "--keys", metavar="FOLDER", help="weights leave this device encrypted with these, or not at all"
    )
    parser.add_argument(
        "--tell-classes", action="store_true", help="tell the server how many samples of each class there are"
    )
    add_flags(parser, "broker", Broker)
    add_flags(parser, "data", DataSettings, presets=presets(DataSettings.dataset))


def do_serve(chosen: argparse.Namespace) -> None:
    from coterie.api import make_method
    from coterie.cli.train import live_page
    from coterie.clients.remote import Patience
    from coterie.comparison import title
    from coterie.core.local import Sgd
    from coterie.deploy.server import Service, serve
    from coterie.display import round_line
    from coterie.federation import Safety, Settings
    from coterie.network.mqtt import Broker
    from coterie.protection import Protection
    from coterie.protection.encryption import Encryption

    kind = type(make_method(chosen.method))
    parts = (Sgd, Settings, Safety, Protection, Encryption, kind)
    settings = {n: v for part in parts for n, v in given(chosen, part).items()}
    quiet = hasattr(chosen, "json")
    out = Path(getattr(chosen, "out", None) or f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{chosen.method}-served")
    show = (lambda line: None) if quiet else say
    start = time.monotonic()
    with live_page(chosen) as page:
        if page:
            page.begin(title(chosen.method), settings.get("rounds", Settings.rounds), settings.get("seed", 0))

        def watch(record: Round) -> None:
            show(round_line(record, time.monotonic() - start))
            if page:
                page(record)

        result = serve(
            chosen.method,
            Service(**given(chosen, Service)),
            Broker(**given(chosen, Broker)),
            model=getattr(chosen, "model", None),
            head=getattr(chosen, "head", None),
            protocol=chosen.protocol,
            patience=Patience(**given(chosen, Patience)),
            out=out,
            resume=hasattr(chosen, "resume"),
            watch=watch,
            show=show,
            **settings,
        )
    outcomes = [{"name": o.name, "measured": o.point, **o.last._asdict()} for o in result.outcomes()]
    if quiet:
        print(json.dumps({"folder": str(out), "outcomes": outcomes}, indent=2))
    for outcome in [] if quiet else outcomes:
        say(f"{outcome['name']}: {100 * outcome['mean']:.2f} (mean over clients), worst tenth "
            f"{100 * outcome['worst10']:.2f}")  # fmt: skip
    show(f"Everything but the clients' models, which are on their devices, is in {out}")


def say(line: str) -> None:
    print(line, flush=True)


def do_join(chosen: argparse.Namespace) -> None:
    from coterie.api import DataSettings
    from coterie.deploy.hosted import load_hosted
    from coterie.deploy.member import Member
    from coterie.deploy.parts import Plans
    from coterie.network.mqtt import Broker

    ids, held = load_hosted(chosen.clients, DataSettings(**given(chosen, DataSettings)))
    broker = Broker(**given(chosen, Broker))
    plans = Plans(Path(chosen.dir), getattr(chosen, "model", None), getattr(chosen, "keys", None))
    member = Member(broker, chosen.name, chosen.device, held, ids, plans, say, hasattr(chosen, "tell_classes"))
    left = member.run()
    if left:
        say(f"the federation is over; the models of clients {', '.join(map(str, ids))} are in {left}")
        say(f"coterie predict {left} --client {ids[0]} ... uses them")


def do_flower(chosen: argparse.Namespace) -> None:
    from coterie.deploy.flower_app import write_app

    asked = {name: value for name, value in vars(chosen).items() if name not in ("act", "command", "folder", "method")}
    for path in write_app(Path(chosen.folder), chosen.method, asked):
        print(path)


def do_certs(chosen: argparse.Namespace) -> None:
    from coterie.core.errors import CoterieError
    from coterie.deploy.certs import make_certificates

    if chosen.days < 1 or not 0 < chosen.port < 65536:
        raise CoterieError("days must be at least 1, and the port between 1 and 65535")
    for path in make_certificates(Path(chosen.folder), chosen.devices, chosen.host, chosen.port, chosen.days):
        print(os.path.relpath(path) if not Path(chosen.folder).is_absolute() else path)
