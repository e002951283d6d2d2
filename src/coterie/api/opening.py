"""The first lines of a run: how data, network, method and settings were interpreted. At most one screen."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

import torch

from coterie.core.batchnorm import AVERAGED, LOCAL, WORDS, KeptNorms, kept_names
from coterie.core.data import FederatedData
from coterie.core.errors import some_of
from coterie.core.method import AnyMethod
from coterie.core.model import Model
from coterie.core.printable import printable
from coterie.core.task import Classification, Task
from coterie.core.training import LocalTraining
from coterie.core.wrapper import innermost, lasting
from coterie.data import describe_input
from coterie.data.describe import SHOWN
from coterie.data.user.pooled import GUESSED
from coterie.execution import Backend, LocalBackend
from coterie.federation import Settings
from coterie.runs.describe import numbers


def opening(backend: Backend, settings: Settings, name: str | None = None) -> list[str]:
    """name: of the network, if it has one."""
    method = innermost(backend.method)
    data = data_lines(backend) if isinstance(backend, LocalBackend) else []
    network = [
        *model_lines(backend.model, name_words(backend, name)),
        *norm_lines(backend.method, backend.model, settings.batchnorm),
    ]
    lines = [*data, *network, *method_lines(method), federation_line(settings, backend)]
    return list(map(printable, lines))


def data_lines(backend: LocalBackend) -> list[str]:
    data = backend.data
    names = f" ({some_of(data.client_names, 6)})" if data.client_names else ""
    settings = data.partition.settings if data.partition is not None else {}
    guess = f" ({GUESSED} from the labels; --task or task=... names another)" if settings.get("task") == GUESSED else ""
    return [
        f"data: {data.name}, {data.num_clients} clients{names}, {sum(data.train.sizes)} training samples, "
        f"{sum(data.test.sizes)} test samples",
        *describe_input(data),
        f"task: {data.task.described()}{guess}; metric: {data.task.metric.scale.words}",
        *label_lines(data),
    ]


def label_lines(data: FederatedData) -> list[str]:
    """Classes with their numbers of training samples, or the names of targets."""
    if data.classes:
        counts = torch.bincount(data.train.y, minlength=data.classes).tolist()
        names = data.class_names or tuple(map(str, range(data.classes)))
        classes = [f"{name}: {n}" for name, n in zip(names, counts, strict=True)]
        return [f"classes, with training samples: {some_of(classes, SHOWN)}{positive_words(data.task, names)}"]
    return [f"labels: {some_of(data.class_names, SHOWN)}"] if data.class_names else []


def positive_words(task: Task, names: Sequence[str]) -> str:
    """Which of two classes sensitivity is about, if its metrics depend on it."""
    if not isinstance(task, Classification) or len(names) != 2:
        return ""
    return f"; positive: {names[task.positive]} (--task-args positive=NAME names another)"


def name_words(backend: Backend, name: str | None) -> str:
    """The name of a network, and which axis of a series it takes for time."""
    shape = backend.data.shape if isinstance(backend, LocalBackend) else ()
    if len(shape) == 2 and name in ("cnn1d", "lstm", "transformer"):
        axes = ("channels", "steps") if name == "cnn1d" else ("steps", "features")
        return f"{name} (samples as {shape[0]} {axes[0]} x {shape[1]} {axes[1]}), "
    return f"{name}, " if name else ""


def model_lines(model: Model, name: str = "") -> list[str]:
    encoder, head, frozen = map(numbers, (model.start.encoder, model.start.head, model.frozen))
    fixed = f"; {frozen:,} frozen numbers, which are not trained and do not travel" if frozen else ", nothing frozen"
    random = f"; random in training: {model.draws}" if model.draws else ""
    parts = f"{encoder:,} numbers in the encoder, {head:,} in the head '{model.head_name}'"
    whole = f"{encoder:,} numbers, no head was found"
    return [f"network: {name}{whole if model.headless else parts}{fixed}{random}"]


def norm_lines(method: AnyMethod, model: Model, policy: str) -> list[str]:
    """How BatchNorm is handled; nothing for a network without it."""
    if not kept_names(LOCAL, model):
        return []
    kept = lasting(method)
    nothing = isinstance(kept, KeptNorms) and not kept.places
    more = f"; {method.title} sends none of it in any case" if nothing else ""
    other = "" if policy != AVERAGED else "; --batchnorm or batchnorm=... names another policy"
    return [f"batchnorm: {policy}: {WORDS[policy]}{more}{other}"]


def method_lines(method: AnyMethod) -> list[str]:
    own = ", ".join(f"{f.name} {getattr(method, f.name)}" for f in fields(method) if f.name != "train")
    down, up = message_fields(method, "server_send", "return"), message_fields(method, "server_receive", "ups")
    sent = [f"down {down or 'nothing'}"] * (down is not None) + [f"up {up or 'nothing'}"] * (up is not None)
    return [
        f"method: {method.title}{f' with {own}' if own else ''}",
        *([f"messages: {'; '.join(sent)}"] if sent else []),
        f"local training: {training_words(method.train)}",
    ]


def message_fields(method: AnyMethod, function: str, name: str) -> str | None:
    """The fields of a message, by the annotations of the method's functions; None where they do not say."""
    try:
        hint: Any = typing.get_type_hints(getattr(type(method), function)).get(name)
    except (NameError, TypeError, AttributeError):
        return None
    return ", ".join(hint._fields) if hasattr(hint, "_fields") else None


def training_words(train: LocalTraining) -> str:
    rates = {name.replace("_", " "): value for name, value in asdict(train.rule).items() if value is not False}
    parts = [f"{train.optimizer}, {train.local_epochs} epochs, batch size {train.batch_size}"]
    parts += [name if value is True else f"{name} {value:g}" for name, value in rates.items()]
    parts += [f"gradients clipped at {train.clip_gradient:g}"] if train.clip_gradient else []
    parts += ["incomplete batches dropped"] if train.drop_last else []
    parts += ["optimizer state kept between rounds"] if train.keep_momentum else []
    return ", ".join(parts)


def federation_line(settings: Settings, backend: Backend) -> str:
    known = len(backend.census.samples)
    joining = settings.joining(known)
    share = "all clients" if joining == known else f"{joining} of {known} clients"
    kind = type(backend).__name__.lower()
    where = "on parallel streams" if kind == "streams" else kind
    why = f" ({backend.why})" if backend.why else ""
    return f"federation: {settings.rounds} rounds, {share} in each, seed {settings.seed}; clients run {where}{why}"
