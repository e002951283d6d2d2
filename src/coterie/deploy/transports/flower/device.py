"""The device's end of the Flower transport. Every message starts a new process, so all state is in the device's folder.

Flower's own storage of a node (Context.state) is not used: it is lost when the node restarts, and the models of a
device must be on its disk anyway.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from coterie.api import DataSettings
from coterie.core.data import FederatedData
from coterie.core.errors import CoterieError
from coterie.deploy.device import Device
from coterie.deploy.device_data import load_hosted_clients
from coterie.deploy.device_models import save_models
from coterie.deploy.device_setup import (
    DevicePolicy,
    accept_terms,
    agreement_from_terms,
    device_from_terms,
    exact_statistics,
    load_terms,
    network_from_terms,
)
from coterie.deploy.handshake import SampleSchema, Terms, from_json, hello, to_json
from coterie.deploy.membership import check_name
from coterie.deploy.privacy_record import DELTA
from coterie.deploy.sample_schema import difference
from coterie.deploy.store import federation_folder
from coterie.deploy.transports.flower.connection import Packet
from coterie.deploy.transports.flower.options import read_options
from coterie.deploy.wire import Refused, checksum, readable

log = logging.getLogger("coterie")


@dataclass(frozen=True)
class NodeConfig:
    """The settings in a node config, except those of the data."""

    clients: str = field(default="", metadata={"help": "numbers of the clients on this node, such as 0-2,5"})
    dir: str = field(default="", metadata={"help": "folder of this device: states and models of its clients"})
    device: str = field(default="", metadata={"help": "name of this device (default: from the clients' numbers)"})
    model: str = field(default="", metadata={"help": "package.module:Class of a custom network"})
    method: str = field(default="", metadata={"help": "package.module:Class of a custom method"})
    keys: str = field(default="", metadata={"help": "folder of keys: send weights only encrypted"})
    tell_classes: bool = field(default=False, metadata={"help": "send class counts to the server"})
    tell_scores: bool = field(
        default=False, metadata={"help": "with --dp sample: send scores on the test samples, without noise"}
    )
    max_epsilon: float | None = field(
        default=None, metadata={"help": "stop answering before a client's samples exceed this ε"}
    )
    delta: float = field(default=DELTA, metadata={"help": "δ for max-epsilon"})

    def __post_init__(self) -> None:
        if not self.clients:
            raise CoterieError('`clients` is missing in the node config, such as clients="0-2,5"')
        if not self.dir:
            raise CoterieError('`dir` is missing in the node config: the folder for client states, dir="FOLDER"')
        check_name("device", self.name)

    @property
    def name(self) -> str:
        return self.device or f"clients-{self.clients.replace(',', '.')}"


class FlowerDevice:
    def __init__(self, config: NodeConfig, settings: DataSettings) -> None:
        self.config, self.settings = config, settings
        self.folder = Path(config.dir)

    @cached_property
    def hosted(self) -> tuple[tuple[int, ...], FederatedData]:
        return load_hosted_clients(self.config.clients, self.settings)

    @cached_property
    def policy(self) -> DevicePolicy:
        config = self.config
        return DevicePolicy(
            self.folder,
            config.model or None,
            config.keys or None,
            config.max_epsilon,
            config.delta,
            config.tell_scores,
            exact_statistics(self.settings, self.hosted[1], config.tell_classes),
            config.method or None,
            task=type(self.hosted[1].task),
        )

    def answer(self, kind: str, packet: Packet) -> Packet:
        return {"hello": self.hello, "requests": self.requests, "over": self.over}[kind](packet)

    def hello(self, packet: Packet) -> Packet:
        """Reply with a hello. Terms in the packet are validated and stored."""
        ids, data = self.hosted
        _ = self.policy  # raises before anything is sent that the user does not allow
        if reason := packet.words.get("refused"):
            log.error("coterie: the server refused this node: %s", readable(reason))
        reply = hello(self.config.name, data, ids, self.config.tell_classes)
        if packet.parts:
            self._take_terms(*packet.parts)
            reply = replace(reply, ready=packet.words["federation"])
        return Packet({"device": reply.device}, (to_json(reply),))

    def requests(self, packet: Packet) -> Packet:
        """Answer all valid requests in a packet."""
        device, _ = self._begin(packet.words["federation"])
        count = int(packet.words["shared"])
        shared = {checksum(part): part for part in packet.parts[:count]}
        clients, answers, refused = [], [], []
        for own in packet.parts[count:]:
            try:
                header = device.agreement.header_of(own)
                answer, failed = device.answer(own, shared.get(header.shared, b""))
            except Refused as reason:
                refused.append(str(reason))
                continue
            clients.append(str(header.client))
            answers.append(answer)
            log.info("client %d: %s%s", header.client, header.kind, " failed" if failed else "")
        return Packet({"clients": " ".join(clients), "refused": "; ".join(refused)}, tuple(answers))

    def over(self, packet: Packet) -> Packet:
        """The federation has ended: save the models."""
        device, terms = self._begin(packet.words["federation"])
        device.round = int(packet.words["round"])
        for client in device.ids:
            device.measure(client)
        if device.record is not None:
            log.info("%s", device.record.summary(device.ids))
        saved = save_models(device, terms, federation_folder(self.folder, terms.federation) / "run", self.policy)
        log.info("the federation has ended; the models of clients %s are in %s", self.config.clients, saved.resolve())
        return Packet({})

    def _take_terms(self, payload: bytes, start: bytes) -> None:
        try:
            terms = from_json(Terms, payload)
        except Refused as reason:
            raise CoterieError(f"invalid terms from the server: {reason}") from None
        if found := difference("this node", SampleSchema.of(self.hosted[1]), "the federation", terms.schema):
            raise CoterieError(found)
        accept_terms(terms, start, self.policy)

    def _begin(self, federation: str) -> tuple[Device, Terms]:
        stored = load_terms(federation_folder(self.folder, federation), federation)
        if stored is None:
            raise CoterieError(f"the terms of this federation are missing in {self.config.dir}")
        terms, start = stored
        ids, data = self.hosted
        agreement = agreement_from_terms(terms, network_from_terms(terms, self.policy, start), self.policy)
        return device_from_terms(terms, agreement, data, ids, self.policy), terms


def device_from_config(config: Mapping[str, Any]) -> FlowerDevice:
    """The device of a node with this node config."""
    node, data = read_options("node config: ", config, NodeConfig, DataSettings)
    return FlowerDevice(NodeConfig(**node), DataSettings(**data))
