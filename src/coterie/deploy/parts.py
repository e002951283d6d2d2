"""From the server's terms to the objects that they stand for, on a device."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from coterie.core import tree
from coterie.core.errors import CoterieError
from coterie.core.model import Model, make_model
from coterie.deploy.terms import Brief, dtype_of, from_json, to_json
from coterie.federation.disk import whole
from coterie.methods import AnyMethod
from coterie.models import build
from coterie.network.letters import Agreement
from coterie.network.wire import Refused, Schema, checksum, peek, unseal
from coterie.personal.config import made_method
from coterie.protection import Protection
from coterie.protection.encryption import Encrypted
from coterie.protection.keys import load_secret


@dataclass(frozen=True)
class Plans:
    """What the user of a device lets it do."""

    folder: Path  # of the device
    model: str | nn.Module | None = None  # the network, where it is not one of Coterie's
    keys: str | None = None  # folder of keys: weights leave this device encrypted, or not at all


def network_of(brief: Brief, plans: Plans, start: bytes | None = None) -> Model:
    """The model of a federation. start: the message with its first weights."""
    named = brief.network
    if named is None or ":" in named:  # code of somebody's: only what the user of this device named is imported
        if plans.model is None:
            raise CoterieError(
                f"the federation trains a network of its own ({named or 'without a name'}); install its code here and "
                "name it with --model package.module:Class"
            )
        named = None
    facts = brief.facts
    network = plans.model if named is None else named
    assert network is not None
    made = build(network, facts.shape, facts.classes, brief.seed) if isinstance(network, str) else network
    model = make_model(made, facts.shape, facts.classes, facts.transform, brief.head)
    if start is None:
        return model
    schema = Schema.of(model.start)
    try:
        peek(start, schema)
    except Refused as reason:
        raise CoterieError(f"the network here is not the one that the server has: {reason}") from None
    return replace(model, start=tree.fill(model.start, unseal(start, schema)))


def agreement_of(brief: Brief, model: Model, plans: Plans) -> Agreement:
    facts = brief.facts
    try:
        deal = Agreement(
            method_of(brief, model, plans), model, brief.clients, facts.shape, dtype_of(facts), brief.splits,
            brief.seed, brief.compress, brief.federation,
        )  # fmt: skip
        _ = deal.forms  # whether the method works with what it is given
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError) as error:
        raise CoterieError(f"the server's terms cannot be taken: its method is none ({error})") from None
    return deal


def method_of(brief: Brief, model: Model, plans: Plans) -> AnyMethod:
    """The method, with the protection that the server asks for."""
    method, asked = made_method(brief.method), brief.protection
    encrypted = asked.get("encrypt") is not None
    if encrypted and plans.keys is None:
        raise CoterieError("the weights of this federation are encrypted: give the folder of its keys with --keys")
    if plans.keys is not None and not encrypted:
        raise CoterieError("the server wants weights that it can read; with --keys this device does not send such")
    if asked.get("around"):
        secret = own_secret(plans.folder)
        method = Protection(**asked["around"]).around(method, model, asked["joining"], brief.seed, secret)
    return Encrypted(inner=method, keys=load_secret(plans.keys)) if plans.keys is not None else method


def own_secret(folder: Path) -> int:
    """What the noise of this device is drawn from: made once, and told to nobody."""
    path = folder / "secret"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with whole(path) as part, open(os.open(part, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            file.write(str(secrets.randbits(63)))
    return int(path.read_text())


def keep_terms(folder: Path, brief: Brief, start: bytes) -> None:
    """For a device that is away when the federation ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in (("brief.json", to_json(brief)), ("start.bin", start)):
            with whole(folder / name) as part:
                part.write_bytes(content)
    except OSError as error:
        raise CoterieError(f"{folder} cannot be written to: {error.strerror}") from None


def kept_terms(folder: Path, federation: str) -> tuple[Brief, bytes] | None:
    try:
        brief, start = from_json(Brief, (folder / "brief.json").read_bytes()), (folder / "start.bin").read_bytes()
    except (OSError, Refused):
        return None
    return (brief, start) if brief.federation == federation and checksum(start) == brief.start else None
