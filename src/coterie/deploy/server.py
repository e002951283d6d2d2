"""The server of a federation of devices: it waits for them, tells them the terms, and runs the rounds."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from coterie.api import choose, drive, guarantee
from coterie.clients.devices import Devices, Greet
from coterie.clients.mqtt import Mqtt
from coterie.clients.remote import Patience, Remote
from coterie.core.around import innermost
from coterie.core.errors import CoterieError, unknown
from coterie.core.model import Model, make_model
from coterie.deploy.roll import NAME, Roll
from coterie.deploy.terms import Brief, Facts, dtype_of, to_json
from coterie.federation import Result, Round, Settings
from coterie.federation.folder import read_config
from coterie.methods import AnyMethod
from coterie.models import build
from coterie.network.letters import COMPRESS, Agreement
from coterie.network.mqtt import Broker
from coterie.network.wire import checksum
from coterie.protection import Protection
from coterie.protection.encryption import Encryption

log = logging.getLogger("coterie")


@dataclass(frozen=True)
class Service:
    """A federation over a network."""

    name: str = field(default="federation", metadata={"help": "name of the federation; devices join by it"})
    num_clients: int = field(default=0, metadata={"help": "clients that take part", "flags": ("num-clients", "nc")})
    compress: str = field(default="none", metadata={"help": "messages: none, zstd, fp16, bf16, fp16+zstd or bf16+zstd"})

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise CoterieError(f"'{self.name}' is no name for a federation: letters, digits, '-', '_' and '.' only")
        if self.num_clients < 1:
            raise CoterieError("how many clients take part? Say it with --num-clients")
        if self.compress not in COMPRESS:
            raise unknown("way to compress", self.compress, COMPRESS)


def serve(method: str | AnyMethod, service: Service, broker: Broker, **how: Any) -> Result:
    """All rounds with devices that join over MQTT. how: what `conduct` takes."""
    return conduct(method, service, partial(Mqtt, broker, service.name), **how)


def conduct(
    method: str | AnyMethod,
    service: Service,
    connect: Callable[[Greet], Devices],
    *,
    model: str | nn.Module | None = None,
    head: str | None = None,
    protocol: str = "pac",
    patience: Patience = Patience(),  # noqa: B008
    out: str | Path | None = None,
    resume: bool = False,
    watch: Callable[[Round], None] = lambda record: None,
    show: Callable[[str], None] = log.info,
    config: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Result:
    """All rounds with the devices that come. resume: go on with the run in `out`, if there is one."""
    resume = resume and out is not None and (Path(out) / "config.json").exists()
    roll = Roll(service.num_clients)

    def greet(device: str, payload: bytes) -> tuple[tuple[int, ...], str | None]:
        ids, ready = roll.greet(device, payload)
        if ids and (ready is None) != (device not in post.here):
            show(f"{device} {'is gone' if ready is None else 'is here'}: clients {', '.join(map(str, ids))}")
        return ids, ready

    post = connect(greet)
    try:
        gather(roll, post, patience, show)
        facts = roll.facts
        protection = Protection(**{f.name: settings.pop(f.name) for f in fields(Protection) if f.name in settings})
        encryption = Encryption(**{f.name: settings.pop(f.name) for f in fields(Encryption) if f.name in settings})
        chosen, federation, safety, usual = choose(method, protocol, facts.name, facts.shape, settings)
        check(federation)
        network = model if model is not None else usual
        identity = read_config(Path(out))["deployment"]["federation"] if resume and out else secrets.token_hex(16)
        made = network_for(network, facts, federation.seed, head)
        dtype, joining = dtype_of(facts), federation.joining(roll.clients)
        sizes = roll.census.samples.tolist()
        privacy = guarantee(protection, chosen, made, federation, torch.zeros(1, *facts.shape, dtype=dtype), sizes)
        around = {} if protection == Protection() else asdict(protection)
        layered = protection.around(chosen, made, joining, federation.seed, secrets.randbits(63))
        layered = encryption.on_server(layered)
        asked = {"around": around, "joining": joining, "encrypt": encryption.encrypt}
        deal = Agreement(
            layered, made, roll.clients, facts.shape, dtype, roll.splits, federation.seed, service.compress, identity
        )
        name = network if isinstance(network, str) else None
        announce(post, deal, facts, federation, name, head, asked)
        clients = Remote(deal, roll.census, post, patience, safety.max_left_out)
        about = {
            **(config or {}),
            "network": {"name": name, "head": head},
            "data": roll.about(),
            "protection": {**around, "privacy": privacy} if around else {},
            **encryption.about(layered),
            "deployment": {"federation": identity, **asdict(service), "devices": devices(roll)},
        }
        result = drive(clients, None, federation, safety, out, resume, watch, about)
        post.over()
        received, sent = post.traffic
        show(f"on the wire: {sent / 1e6:.2f} MB sent, {received / 1e6:.2f} MB received (compress: {service.compress})")
        return result
    finally:
        post.close()


def gather(roll: Roll, post: Devices, patience: Patience, show: Callable[[str], None]) -> None:
    """Until every client has a device."""
    end, told = time.monotonic() + patience.wait, -1
    while not roll.full:
        if len(roll.owner) != told:
            told = len(roll.owner)
            show(f"waiting for devices: {told} of {roll.clients} clients are there")
        if time.monotonic() > end:
            missing = ", ".join(map(str, roll.missing[:20]))
            raise CoterieError(f"nobody came with the clients {missing} in {patience.wait:g} s (--wait)")
        post.receive(1.0)


def network_for(network: str | nn.Module, facts: Facts, seed: int, head: str | None) -> Model:
    made = build(network, facts.shape, facts.classes, seed) if isinstance(network, str) else network
    return make_model(made, facts.shape, facts.classes, facts.transform, head)


def announce(
    post: Devices,
    deal: Agreement,
    facts: Facts,
    federation: Settings,
    network: str | None,
    head: str | None,
    protection: dict[str, Any],
) -> None:
    start, method = deal.start_message(), innermost(deal.method)
    brief = Brief(
        deal.federation,
        deal.digest,
        checksum(start),
        {"name": method.title, **asdict(method)},
        network,
        head,
        deal.clients,
        federation.rounds,
        deal.splits,
        deal.seed,
        deal.compress,
        facts,
        protection,
    )
    post.announce(deal.federation, to_json(brief), start, deal.most_answer)


def check(federation: Settings) -> None:
    if federation.new_clients:
        raise CoterieError("new clients are met in simulation; a device may join a federation of its own")


def devices(roll: Roll) -> dict[str, list[int]]:
    return {device: [client.id for client in said.clients] for device, said in sorted(roll.devices.items())}
