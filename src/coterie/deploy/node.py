"""A device on Flower's line. Every message meets a new process there, so all that a device knows is in its folder.

Flower's own memory of a node (Context.state) is not used: it is lost when the node starts anew, and the models that a
device leaves must be on its disk anyway.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from coterie.api import DataSettings
from coterie.core.errors import CoterieError
from coterie.core.samples import FederatedData
from coterie.deploy.device import Device
from coterie.deploy.hosted import load_hosted
from coterie.deploy.leave import leave_models
from coterie.deploy.options import read_options
from coterie.deploy.parts import Plans, agreement_of, keep_terms, kept_terms, network_of
from coterie.deploy.roll import NAME
from coterie.deploy.store import Store
from coterie.deploy.terms import Brief, from_json, hello, to_json
from coterie.network.flower import Parcel
from coterie.network.wire import Refused, checksum

log = logging.getLogger("coterie")


@dataclass(frozen=True)
class Hosting:
    """What the node config says beside the data."""

    clients: str = field(default="", metadata={"help": "numbers of the clients that are here, such as 0-2,5"})
    dir: str = field(default="", metadata={"help": "folder of this device: what its clients remember, their models"})
    device: str = field(default="", metadata={"help": "name of this device; usually made of the clients' numbers"})
    model: str = field(default="", metadata={"help": "package.module:Class, where the network is not Coterie's own"})
    keys: str = field(default="", metadata={"help": "folder of keys: weights leave this device encrypted"})
    tell_classes: bool = field(default=False, metadata={"help": "tell the server the number of samples of each class"})

    def __post_init__(self) -> None:
        if not self.clients:
            raise CoterieError('which clients are here? Say it in the node config, such as clients="0-2,5"')
        if not self.dir:
            raise CoterieError('where is what clients remember to be kept? Say it in the node config: dir="FOLDER"')
        if not NAME.fullmatch(self.name):
            raise CoterieError(f"'{self.name}' is no name for a device: letters, digits, '-', '_' and '.' only")

    @property
    def name(self) -> str:
        return self.device or f"clients-{self.clients.replace(',', '.')}"


class Node:
    def __init__(self, hosting: Hosting, wanted: DataSettings) -> None:
        self.hosting, self.wanted = hosting, wanted
        self.folder = Path(hosting.dir)
        self.plans = Plans(self.folder, hosting.model or None, hosting.keys or None)

    @cached_property
    def held(self) -> tuple[tuple[int, ...], FederatedData]:
        return load_hosted(self.hosting.clients, self.wanted)

    def answer(self, kind: str, parcel: Parcel) -> Parcel:
        return {"hello": self.hello, "letters": self.letters, "over": self.over}[kind](parcel)

    def hello(self, parcel: Parcel) -> Parcel:
        """Who this is. Terms that come with the question are kept, if they can be taken."""
        ids, data = self.held
        said = hello(self.hosting.name, data, ids, self.hosting.tell_classes)
        if parcel.parts:
            self._take_terms(*parcel.parts)
            said = replace(said, ready=parcel.words["federation"])
        return Parcel({"device": said.device}, (to_json(said),))

    def letters(self, parcel: Parcel) -> Parcel:
        """Answers, to as many letters as can be answered."""
        device, _ = self._begin(parcel.words["federation"])
        count = int(parcel.words["shared"])
        shared = {checksum(part): part for part in parcel.parts[:count]}
        clients, answers, refused = [], [], []
        for own in parcel.parts[count:]:
            try:
                header = device.agreement.header_of(own)
                answer, trouble = device.answer(own, shared.get(header.shared, b""))
            except Refused as reason:
                refused.append(str(reason))
                continue
            clients.append(str(header.client))
            answers.append(answer)
            log.info("client %d: %s%s", header.client, header.kind, ", which it could not" if trouble else "")
        return Parcel({"clients": " ".join(clients), "refused": "; ".join(refused)}, tuple(answers))

    def over(self, parcel: Parcel) -> Parcel:
        device, brief = self._begin(parcel.words["federation"])
        device.round = int(parcel.words["round"])
        for client in device.ids:
            device.measure(client)
        left = leave_models(device, brief, self._place(brief.federation) / "run")
        log.info("the federation is over; the models of clients %s are in %s", self.hosting.clients, left.resolve())
        return Parcel({})

    def _take_terms(self, told: bytes, start: bytes) -> None:
        try:
            brief = from_json(Brief, told)
        except Refused as reason:
            raise CoterieError(f"the server's terms cannot be taken: {reason}") from None
        deal = agreement_of(brief, network_of(brief, self.plans, start), self.plans)
        if deal.digest != brief.digest or checksum(start) != brief.start:
            raise CoterieError(
                "server and device do not agree on method, model or settings: are both of the same version of "
                "Coterie and torch, and is `model` the same?"
            )
        keep_terms(self._place(brief.federation), brief, start)

    def _begin(self, federation: str) -> tuple[Device, Brief]:
        terms = kept_terms(self._place(federation), federation)
        if terms is None:
            raise CoterieError(f"the terms of this federation are not in {self.hosting.dir} any more")
        brief, start = terms
        ids, data = self.held
        deal = agreement_of(brief, network_of(brief, self.plans, start), self.plans)
        held = replace(data, transform=brief.facts.transform)
        return Device(deal, held, ids, Store(self._place(federation))), brief

    def _place(self, federation: str) -> Path:
        return self.folder / federation[:16]


def node_of(config: Mapping[str, Any]) -> Node:
    """What a node config speaks of."""
    hosting, wanted = read_options("node config: ", config, Hosting, DataSettings)
    return Node(Hosting(**hosting), DataSettings(**wanted))
