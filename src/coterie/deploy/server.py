"""The server of a federation: waits for devices, announces the terms, and runs the rounds."""

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

from coterie.analysis.lookup import described
from coterie.api import About, choose, drive, guarantee
from coterie.api.result import Result
from coterie.core.batchnorm import AVERAGED
from coterie.core.errors import CoterieError, unknown
from coterie.core.method import AnyMethod
from coterie.core.model import Model
from coterie.core.rehearsal import rehearse
from coterie.core.task import Task
from coterie.core.tasks import task_class
from coterie.core.wrapper import innermost
from coterie.deploy.agreement import COMPRESS, Agreement
from coterie.deploy.handshake import SampleSchema, Terms, dtype_of, to_json
from coterie.deploy.membership import MAX_SAMPLES, Membership, check_name
from coterie.deploy.pending import Timeouts
from coterie.deploy.remote import Remote
from coterie.deploy.roster import read_roster
from coterie.deploy.server_samples import ServerTest, load_server_test
from coterie.deploy.transports.mqtt.connection import Broker
from coterie.deploy.transports.mqtt.server import MqttTransport
from coterie.deploy.transports.presence import DeviceTransport, Register
from coterie.deploy.wire import Refused, checksum
from coterie.federation import Round, Safety, Settings
from coterie.models import build_model
from coterie.personal.labelled import LabelledReading
from coterie.personal.labels import LabelMapping
from coterie.privacy import SECRET, Protection
from coterie.privacy.encryption import Encryption
from coterie.runs.config import read_config
from coterie.runs.finding import is_started

log = logging.getLogger("coterie")


@dataclass(frozen=True)
class Service:
    """The settings of a federation of devices."""

    name: str = field(default="federation", metadata={"help": "name of the federation, for `coterie join --name`"})
    num_clients: int = field(default=0, metadata={"help": "number of clients", "short": ("nc",), "required": True})
    max_samples: int = field(default=MAX_SAMPLES, metadata={"help": "maximum number of samples per client"})
    roster: str | None = field(
        default=None, metadata={"help": "file with lines CLIENT DEVICE [FINGERPRINT]: which device hosts which client"}
    )
    test: str | None = field(
        default=None, metadata={"help": "test samples of the server for the global model: a path, or a dataset's name"}
    )
    label_column: str | None = field(default=None, metadata={"help": "column with the labels, in a table of --test"})
    labels: str | None = field(
        default=None, metadata={"help": "what the labels in --test mean: in-order, or LABEL=CLASS,LABEL=CLASS"}
    )
    compress: str = field(
        default="none", metadata={"help": "compression of messages: none, zstd, fp16, bf16, fp16+zstd or bf16+zstd"}
    )

    def __post_init__(self) -> None:
        check_name("federation", self.name)
        if self.num_clients < 1:
            raise CoterieError("--num-clients is required: the number of clients of the federation")
        if self.max_samples < 1:
            raise CoterieError(f"--max-samples must be at least 1, got {self.max_samples}")
        if self.compress not in COMPRESS:
            raise unknown("compression", self.compress, COMPRESS)
        if self.test is None and (self.label_column or self.labels):
            raise CoterieError("--label-column and --labels are for the samples of --test, which is missing")
        LabelMapping.parse(self.labels)  # fail early


def serve(method: str | AnyMethod, service: Service, broker: Broker, **how: Any) -> Result:
    """Run the server of a federation over MQTT. how: keyword arguments of `run_federation`."""
    return run_federation(method, service, partial(MqttTransport, broker, service.name), **how)


def run_federation(
    method: str | AnyMethod,
    service: Service,
    connect: Callable[[Register], DeviceTransport],
    *,
    model: str | nn.Module | None = None,
    head: str | None = None,
    model_args: Mapping[str, Any] | None = None,
    train_only: str | None = None,
    task: str | None = None,
    protocol: str = "pac",
    timeouts: Timeouts = Timeouts(),  # noqa: B008
    out: str | Path | None = None,
    resume: bool = False,
    watch: Callable[[Round], None] = lambda record: None,
    show: Callable[[str], None] = log.info,
    config: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Result:
    """Run all rounds with the devices that join. resume: continue the run in `out`, if there is one.

    task: import path of the task, if it is not built in; the devices say which task they train for.
    """
    resume = resume and out is not None and is_started(Path(out))
    protection = Protection(**{f.name: settings.pop(f.name) for f in fields(Protection) if f.name in settings})
    roster = read_roster(service.roster, service.num_clients) if service.roster else None
    own = None if task is None else task_class(task)
    membership = Membership(service.num_clients, roster, service.max_samples, protection.robust is not None, own)
    before = read_config(Path(out))["deployment"] if resume and out else {}
    restore(membership, before)

    def register(device: str, payload: bytes) -> tuple[tuple[int, ...], str | None]:
        ids, ready = membership.register(device, payload)
        if ids and (ready is None) != (device not in transport.connected):
            names = {client.id: client.name for hello in membership.devices.values() for client in hello.clients}
            listed = ", ".join(f"{i} ({names[i]})" if names.get(i) else str(i) for i in ids)
            show(f"{device} {'disconnected' if ready is None else 'connected'}: clients {listed}")
        return ids, ready

    transport = connect(register)
    try:
        wait_for_clients(membership, transport, timeouts, show)
        if roster is None:
            show("no --roster: each client is bound to the first device and certificate that announced it")
        schema = membership.schema
        encryption = Encryption(**{f.name: settings.pop(f.name) for f in fields(Encryption) if f.name in settings})
        chosen, federation, safety, default_model = choose(
            method, protocol, About(schema.name, schema.shape, membership.num_clients), settings
        )
        check(federation)
        check_private(protection, safety)
        network = model if model is not None else default_model
        identity = before["federation"] if before else secrets.token_hex(16)
        made = network_for(network, schema, federation.seed, head, model_args, train_only, own)
        dtype, joining = dtype_of(schema), federation.joining(membership.num_clients)
        labels = made.task.example(made.label)
        rehearse(chosen, made, torch.zeros(4, *schema.shape, dtype=dtype), torch.cat([labels, labels]))
        sizes = membership.census.samples.tolist()
        privacy = guarantee(protection, chosen, made, federation, torch.zeros(1, *schema.shape, dtype=dtype), sizes)
        privacy = privacy and {**privacy, "noise": SECRET}
        around = {} if protection == Protection() else asdict(protection)
        layered = protection.deployed(chosen, made, joining)
        layered = encryption.on_server(layered)
        requested = {"around": around, "joining": joining, "encrypt": encryption.encrypt}
        agreement = Agreement(
            layered,
            made,
            membership.num_clients,
            schema.shape,
            dtype,
            membership.splits,
            federation.seed,
            service.compress,
            identity,
        )
        test = server_test(service, schema, agreement)
        name = network if isinstance(network, str) else None
        announce(transport, agreement, schema, federation, name, head, requested, train_only)
        missing, held, names = safety.max_left_out, membership.held, membership.names
        backend = Remote(agreement, membership.census, transport, timeouts, missing, held, names, bool(before), test)
        about = {
            **(config or {}),
            "network": {"name": name, "head": head, "args": dict(model_args or {}), "train_only": train_only},
            "data": membership.about(),
            "protection": {**around, "privacy": privacy} if around else {},
            **encryption.about(layered),
            "deployment": {"federation": identity, **asdict(service), **devices(membership)},
        }
        result = drive(backend, None, federation, safety, out, resume, watch, about)
        transport.end_federation()
        received, sent = transport.traffic
        show(f"traffic: {sent / 1e6:.2f} MB sent, {received / 1e6:.2f} MB received (compress: {service.compress})")
        return result
    finally:
        transport.close()


def restore(membership: Membership, before: Mapping[str, Any]) -> None:
    """Restore the devices of a resumed run: it does not wait for all of them to reconnect."""
    try:
        membership.restore(before.get("hellos", ()))
    except (Refused, TypeError) as reason:
        raise CoterieError(f"cannot resume: config.json does not list valid devices: {reason}") from None
    if before and before.get("num_clients") != membership.num_clients:
        raise CoterieError(
            f"cannot resume: the run has {before.get('num_clients')} clients, but --num-clients is "
            f"{membership.num_clients}"
        )


def wait_for_clients(
    membership: Membership, transport: DeviceTransport, timeouts: Timeouts, show: Callable[[str], None]
) -> None:
    """Wait until every client has a device."""
    end, shown = time.monotonic() + timeouts.wait, -1
    while not membership.full:
        missing = membership.labels(membership.missing)
        if len(membership.owner) != shown:
            shown = len(membership.owner)
            show(f"waiting for devices: {shown} of {membership.num_clients} clients connected; missing: {missing}")
        if time.monotonic() > end:
            connected = membership.labels(sorted(membership.owner)) or "none"
            raise CoterieError(
                f"timed out waiting for clients {missing} after {timeouts.wait:g} s (--wait); connected: {connected}"
            )
        transport.receive(1.0)


def network_for(
    network: str | nn.Module,
    schema: SampleSchema,
    seed: int,
    head: str | None,
    model_args: Mapping[str, Any] | None = None,
    train_only: str | None = None,
    task: type[Task] | None = None,
) -> Model:
    """task: a class outside Coterie that the user of the server has named."""
    sample = (*schema.raw_sample, schema.task.made(task), schema.transform)
    return build_model(network, *sample, head, seed, model_args, schema.task.label_shape, train_only)


def server_test(service: Service, schema: SampleSchema, agreement: Agreement) -> ServerTest | None:
    """The test samples of the server, if it has any."""
    if service.test is None:
        return None
    if not agreement.templates.read:
        raise CoterieError(
            f"--test evaluates a global model on the server, and {agreement.method.title} has none that the server can "
            "read with these settings; omit --test"
        )
    reading = LabelledReading(labels=LabelMapping.parse(service.labels), label_column=service.label_column)
    return load_server_test(service.test, reading, schema, agreement.model)


def announce(
    transport: DeviceTransport,
    agreement: Agreement,
    schema: SampleSchema,
    federation: Settings,
    network: str | None,
    head: str | None,
    protection: dict[str, Any],
    train_only: str | None = None,
) -> None:
    start, method = agreement.start_message(), innermost(agreement.method)
    terms = Terms(
        agreement.federation,
        agreement.digest,
        checksum(start),
        described(method),
        network,
        head,
        agreement.num_clients,
        federation.rounds,
        agreement.splits,
        agreement.seed,
        agreement.compress,
        schema,
        protection,
        train_only,
    )
    transport.announce(agreement.federation, to_json(terms), start, agreement.max_answer)


def check(federation: Settings) -> None:
    if federation.new_clients:
        raise CoterieError("--new-clients works in simulations only: remove it")
    if federation.batchnorm != AVERAGED:
        raise CoterieError(f"--batchnorm {federation.batchnorm} works in simulations only; devices average BatchNorm")


def check_private(protection: Protection, safety: Safety) -> None:
    """A server that repeats rounds after a crash would need their noise twice, which devices refuse."""
    if protection.private and safety.checkpoint_every != 1:
        raise CoterieError(
            f"--dp and --dp-statistics need a checkpoint of every round: remove --checkpoint-every "
            f"{safety.checkpoint_every}"
        )


def devices(membership: Membership) -> dict[str, Any]:
    """The devices and their hellos, for config.json; a resumed run restores them."""
    known = sorted(membership.devices.items())
    return {
        "devices": {device: [client.id for client in hello.clients] for device, hello in known},
        "hellos": [asdict(hello) for _, hello in known],
    }
