"""Set up a device from the terms of a federation, within the policy of the device's user."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from coterie.api import DataSettings
from coterie.core.data import FederatedData
from coterie.core.errors import CoterieError
from coterie.core.importing import is_code
from coterie.core.method import AnyMethod
from coterie.core.model import Model
from coterie.core.task import Task
from coterie.data.task_choice import read_options
from coterie.deploy.agreement import Agreement
from coterie.deploy.device import Device
from coterie.deploy.handshake import Terms, dtype_of, from_json, to_json
from coterie.deploy.privacy_record import DELTA, PrivacyBudget, PrivacyRecord
from coterie.deploy.store import Store, federation_folder
from coterie.deploy.task_schema import MOMENTS
from coterie.deploy.wire import Refused, TensorSchema, checksum, decode, read_header
from coterie.models import build_model
from coterie.privacy import Protection
from coterie.privacy.encryption import Encrypted
from coterie.privacy.keys import load_secret
from coterie.runs.config import made_method
from coterie.runs.disk import whole, writing

AUTO, FILLS, CLASSES = "--normalise auto", "Filling gaps with the training median", "--tell-classes"
TARGETS = "Standardizing the numbers to predict"
ALTERNATIVES = {  # to options that reveal exact statistics
    AUTO: "use --normalise none, and scale the values beforehand by public constants",
    FILLS: "fill gaps beforehand with public constants",
    CLASSES: "omit it",
    TARGETS: "pass public constants, such as --task-args mean=[140],std=[20]",
}


@dataclass(frozen=True)
class DevicePolicy:
    """What the user of a device allows it to do."""

    folder: Path  # of the device
    model: str | nn.Module | None = None  # the network, if it is not built in
    keys: str | None = None  # folder of keys: the device sends weights only encrypted
    max_epsilon: float | None = None  # privacy budget of each client, over all federations of this folder
    delta: float = DELTA  # δ for this budget, independent of the server
    tell_scores: bool = False  # send scores without noise even where samples are protected
    exact: tuple[str, ...] = ()  # options that reveal exact statistics in the hello, of ALTERNATIVES
    method: str | None = None  # import path of the method, if it is not built in
    model_args: Mapping[str, Any] = field(default_factory=dict)  # of the network's constructor
    task: type[Task] | None = None  # of this device's data

    def __post_init__(self) -> None:
        if self.max_epsilon is not None and not 0 < self.max_epsilon < math.inf:
            raise CoterieError(f"--max-epsilon must be positive and finite, got {self.max_epsilon}")
        if not 0 < self.delta < 1:
            raise CoterieError(f"--delta must be between 0 and 1, got {self.delta}")
        if self.max_epsilon is not None:
            self.refuse_exact("--max-epsilon")

    def refuse_exact(self, why: str) -> None:
        if self.exact:
            raise CoterieError(
                f"{self.exact[0]} sends exact statistics of the samples to the server, without noise, so it cannot be "
                f"combined with {why}; {ALTERNATIVES[self.exact[0]]}"
            )


def exact_statistics(wanted: DataSettings, data: FederatedData, tell_classes: bool) -> tuple[str, ...]:
    """The options that reveal exact statistics of the samples when a device joins."""
    fitted = any(column.fill is not None for column in data.transform.columns)
    constants = read_options(wanted.task_args).keys() >= set(MOMENTS)
    targets = data.task.standardized and not constants
    found = {AUTO: wanted.normalise == "auto", FILLS: fitted, CLASSES: tell_classes, TARGETS: targets}
    return tuple(name for name, used in found.items() if used)


def network_from_terms(terms: Terms, policy: DevicePolicy, start: bytes | None = None) -> Model:
    """Build the model of a federation. start: the message with its initial weights."""
    named = terms.network
    if named is None or ":" in named:  # custom code: import only what the user of this device has named
        if policy.model is None:
            raise CoterieError(
                f"the federation trains a custom network ({named or 'unnamed'}); install its code on this device and "
                "name it with --model package.module:Class"
            )
        named = None
    samples = terms.schema
    network = policy.model if named is None else named
    assert network is not None
    model = build_model(
        network, *samples.raw_sample, samples.task.made(policy.task), samples.transform, terms.head, terms.seed,
        policy.model_args, samples.task.label_shape, terms.train_only,
    )  # fmt: skip
    if start is None:
        return model
    schema = TensorSchema.of(model.initial)
    try:
        read_header(start, schema)
    except Refused as reason:
        raise CoterieError(f"the network on this device differs from the server's: {reason}") from None
    return model.begin_from(decode(start, schema))


def agreement_from_terms(terms: Terms, model: Model, policy: DevicePolicy) -> Agreement:
    schema = terms.schema
    try:
        agreement = Agreement(
            method_from_terms(terms, model, policy), model, terms.clients, schema.shape, dtype_of(schema), terms.splits,
            terms.seed, terms.compress, terms.federation,
        )  # fmt: skip
        _ = agreement.templates  # fail early if the method does not work with these settings
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError) as error:
        raise CoterieError(f"invalid method in the server's terms: {error}") from None
    return agreement


def accept_terms(terms: Terms, start: bytes, policy: DevicePolicy) -> Agreement:
    """Check that this device computes the server's agreement, and store the terms. start: the initial weights."""
    agreement = agreement_from_terms(terms, network_from_terms(terms, policy, start), policy)
    if agreement.digest != terms.digest or checksum(start) != terms.start:
        raise CoterieError(
            "server and device differ in method, model or settings: use the same versions of Coterie and torch, and "
            "the same model"
        )
    save_terms(federation_folder(policy.folder, terms.federation), terms, start)
    return agreement


def method_from_terms(terms: Terms, model: Model, policy: DevicePolicy) -> AnyMethod:
    """The method, with the protection that the server requests and the user of this device allows."""
    method, requested = made_method(terms.method, allowed_method(terms, policy)), terms.protection
    level = (requested.get("around") or {}).get("dp")
    if level == "sample":
        policy.refuse_exact("--dp sample")
    elif policy.max_epsilon is not None:
        raise CoterieError(
            f"--max-epsilon needs a federation in which devices add noise (serve --dp sample); this one uses "
            f"{f'--dp {level}' if level else 'no noise'}"
        )
    encrypted = requested.get("encrypt") is not None
    if encrypted and policy.keys is None:
        raise CoterieError("this federation encrypts its weights: pass the folder of its keys with --keys")
    if policy.keys is not None and not encrypted:
        raise CoterieError("the server requests unencrypted weights, but with --keys this device sends none")
    if requested.get("around"):
        method = Protection(**requested["around"]).deployed(method, model, requested["joining"])
    return Encrypted(inner=method, keys=load_secret(policy.keys)) if policy.keys is not None else method


def allowed_method(terms: Terms, policy: DevicePolicy) -> str | None:
    """The import path of a custom method, if the user of this device has named the same one; None if built in."""
    path = terms.method.get("class")
    if not is_code(path):
        return None
    if policy.method is None:
        raise CoterieError(
            f"the federation uses a custom method ({path}); install its code on this device and name it with "
            "--method package.module:Class"
        )
    if policy.method != path:
        raise CoterieError(f"the federation uses the method {path}, but --method is {policy.method}")
    return policy.method


def device_from_terms(
    terms: Terms, agreement: Agreement, data: FederatedData, ids: tuple[int, ...], policy: DevicePolicy
) -> Device:
    """The device that answers the requests of this federation."""
    protection = Protection(**terms.protection.get("around") or {})
    record = None
    if protection.dp == "sample" or protection.dp_statistics is not None:
        record = PrivacyRecord(
            policy.folder, terms.federation, PrivacyBudget(protection, terms.rounds, policy.max_epsilon, policy.delta)
        )
    tell_scores = policy.tell_scores or protection.dp != "sample"
    data = replace(data, transform=terms.schema.transform, task=agreement.model.task)
    for split in (data.train, data.test, data.validation):
        if split is not None:
            data.task.check_labels(split.y, f"{data.name}: labels for the federation's task")
    return Device(agreement, data, ids, Store(federation_folder(policy.folder, terms.federation)), record, tell_scores)


def save_terms(folder: Path, terms: Terms, start: bytes) -> None:
    """Store the terms, for a device that is not connected when the federation ends."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in (("terms.json", to_json(terms)), ("start.bin", start)):
            with whole(folder / name) as part:
                part.write_bytes(content)


def load_terms(folder: Path, federation: str) -> tuple[Terms, bytes] | None:
    try:
        terms, start = from_json(Terms, (folder / "terms.json").read_bytes()), (folder / "start.bin").read_bytes()
    except (OSError, Refused):
        return None
    return (terms, start) if terms.federation == federation and checksum(start) == terms.start else None
