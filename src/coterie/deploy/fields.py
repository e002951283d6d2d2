"""Every field that a device sends, and how it is protected, generated from the types of the messages.

Each field has a category, declared below by the field's path. A test fails for a field without one, so that no field
can be added without declaring its protection.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

from coterie.core.errors import CoterieError
from coterie.core.method import AnyMethod, Method
from coterie.core.wrapper import innermost
from coterie.deploy.handshake import Hello
from coterie.deploy.wire import Header
from coterie.execution.scoring import Scores
from coterie.methods import METHODS
from coterie.privacy import Protection
from coterie.privacy.examine import examine

SETUP, SCHEMA, SIZE, CLASSES, MEASURED = "setup", "schema", "size", "classes", "measured"
WEIGHTS, STATISTICS, COMPUTED, SCORES, REASON = "weights", "statistics", "computed", "scores", "reason"

ABOUT = {  # category -> description
    SETUP: "names, numbers and certificates of devices, clients, versions and rounds",
    SCHEMA: "schema of the samples: shape, type, task, classes, columns and categories",
    SIZE: "numbers of samples",
    CLASSES: "training samples per class",
    MEASURED: "mean, standard deviation and fill values of the samples, and of numbers to predict",
    WEIGHTS: "trained weights",
    STATISTICS: "statistics of features per class",
    COMPUTED: "other values computed from the samples",
    SCORES: "accuracy, or another metric, and loss on test and validation samples, of personal and global models",
    REASON: "why a client did not answer",
}

CATEGORIES: dict[str, str] = {
    "hello.device": SETUP,
    "hello.schema.name": SCHEMA,
    "hello.schema.classes": SCHEMA,
    "hello.schema.class_names": SCHEMA,
    "hello.schema.shape": SCHEMA,
    "hello.schema.dtype": SCHEMA,
    "hello.schema.task.kind": SCHEMA,
    "hello.schema.task.options": SCHEMA,
    "hello.schema.task.label_shape": SCHEMA,
    "hello.schema.task.mean": MEASURED,
    "hello.schema.task.std": MEASURED,
    "hello.schema.transform.mean": MEASURED,
    "hello.schema.transform.std": MEASURED,
    "hello.schema.transform.crop": SETUP,
    "hello.schema.transform.flip": SETUP,
    "hello.schema.transform.axis": SCHEMA,
    "hello.schema.transform.padding": SCHEMA,
    "hello.schema.transform.columns.name": SCHEMA,
    "hello.schema.transform.columns.categories": SCHEMA,
    "hello.schema.transform.columns.fill": MEASURED,
    "hello.schema.transform.columns.indicator": SCHEMA,
    **{f"hello.schema.transform.inputs.{name}": SCHEMA for name in ("name", "shape", "dtype", "axis", "padding")},
    "hello.schema.transform.inputs.mean": MEASURED,
    "hello.schema.transform.inputs.std": MEASURED,
    "hello.clients.id": SETUP,
    "hello.clients.name": SETUP,
    "hello.clients.counts": CLASSES,
    "hello.clients.test": SIZE,
    "hello.clients.validation": SIZE,
    "hello.certificate": SETUP,
    "hello.signature": SETUP,
    "hello.connected": SETUP,
    "hello.ready": SETUP,
    "hello.session": SETUP,
    "hello.protocol": SETUP,
    "hello.coterie": SETUP,
    "answer.kind": SETUP,
    "answer.federation": SETUP,
    "answer.schema": SETUP,
    "answer.client": SETUP,
    "answer.round": SETUP,
    "answer.rate": SETUP,
    "answer.base": SETUP,
    "answer.made": SETUP,
    "answer.shared": SETUP,
    "answer.measure": SETUP,
    "answer.note": REASON,
    "up.weights": WEIGHTS,
    "up.encoder": WEIGHTS,
    "up.head": WEIGHTS,
    "up.personal": WEIGHTS,
    "up.shared": WEIGHTS,
    "up.components": WEIGHTS,
    "up.core": WEIGHTS,
    "up.simplex": WEIGHTS,
    "up.critical": WEIGHTS,  # which of them matter, from weights before and after training
    "up.control_change": WEIGHTS,
    "up.samples": SIZE,
    "up.effective": SIZE,
    "up.prototypes": STATISTICS,
    "up.moments": STATISTICS,
    "up.variance": STATISTICS,
    "up.counts": STATISTICS,
    "up.cluster": COMPUTED,
    "up.values": COMPUTED,
    "up.condition": COMPUTED,
    "up.mean": COMPUTED,
    "up.loss": COMPUTED,
    "up.information": COMPUTED,
    "up.gaussians": COMPUTED,
    "scores.weighted": SCORES,
    "scores.total": SCORES,
    "scores.loss": SCORES,
}


class Mode(NamedTuple):
    """The options that protect a federation."""

    protection: Protection
    encrypted: bool = False


MODES = {
    "no option": Mode(Protection()),
    "`--dp client`": Mode(Protection(dp="client")),
    "`--dp sample`": Mode(Protection(dp="sample")),
    "`--dp-statistics`": Mode(Protection(dp_statistics=1.0)),
    "`--encrypt`": Mode(Protection(), encrypted=True),
}


class FieldProtection(NamedTuple):
    field: str
    category: str
    protected: str


def protected(category: str, mode: Mode) -> str:
    """How a field of this category is protected."""
    (protection, encrypted), exact = mode, "exact"
    sample, statistics = protection.dp == "sample", protection.dp_statistics is not None
    match category:
        case "setup":
            return "independent of the samples"
        case "schema" | "size":
            return "exact, not covered" if protection.private else exact
        case "classes":
            return "total only" if sample else "total; per class with `--tell-classes`"
        case "measured":
            if sample:
                return "constants only; fitted values are refused"
            return "exact, with `--normalise auto` or `--missing`, and for regression"
        case "weights" if encrypted:
            return "encrypted"
        case "weights" if sample:
            return "noise in every step, counted"
        case "weights" if protection.dp == "client":
            return "exact to the server, which adds the noise"
        case "statistics" if statistics:
            return "noise, counted"
        case "statistics" | "computed" if sample:
            return "the method is refused" if category == COMPUTED else "refused without `--dp-statistics`"
        case "statistics" | "computed" if protection.dp == "client":
            return "the method is refused"
        case "scores" if sample:
            return "not sent; exact with `--tell-scores`"
        case "reason":
            return "a fixed text" if sample or statistics else "the error message"
    return exact


def leaves(kind: Any, path: str) -> Iterator[str]:
    """Paths of the fields of a dataclass or NamedTuple, recursively."""
    if typing.get_origin(kind) is tuple:
        kind = typing.get_args(kind)[0]
    if isinstance(kind, types.UnionType):
        kind = next(part for part in typing.get_args(kind) if part is not type(None))
    if is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        for field in fields(kind):
            yield from leaves(hints[field.name], f"{path}.{field.name}")
    elif hasattr(kind, "_fields"):
        yield from (f"{path}.{name}" for name in kind._fields)
    else:
        yield path


def up_type(method: AnyMethod | type[AnyMethod]) -> Any:
    """The type of a client's update in this method."""
    kind = method if isinstance(method, type) else type(method)
    for base in kind.__mro__:
        for generic in getattr(base, "__orig_bases__", ()):
            if typing.get_origin(generic) is Method:
                return typing.get_args(generic)[3]
    raise CoterieError(f"{kind.__name__} does not say what its clients send: derive it from Method[..., Up]")


def sent(method: AnyMethod | None = None) -> list[str]:
    """Paths of all fields that a device sends (default: with any method)."""
    kinds = [up_type(m) for m in METHODS.values()] if method is None else [up_type(innermost(method))]
    ups = dict.fromkeys(path for kind in kinds for path in leaves(kind, "up"))
    scores = [path for path in leaves(Scores, "scores") if path != "scores.clients"]
    return [*leaves(Hello, "hello"), *leaves(Header, "answer"), *ups, *scores]


def category(field: str) -> str:
    if field not in CATEGORIES:
        raise CoterieError(f"undeclared protection of field {field}: add it to CATEGORIES in {__name__}")
    return CATEGORIES[field]


def rows(method: AnyMethod | None, mode: Mode) -> list[FieldProtection]:
    """Every field that clients of a method (default: of any method) send, with its protection.

    Raises an error if the method does not support the mode.
    """
    if method is not None:
        mode.protection.check(method)
        if mode.encrypted:
            examine(method)
    return [FieldProtection(field, ABOUT[category(field)], protected(category(field), mode)) for field in sent(method)]


def markdown() -> str:
    """The table of docs/privacy.md: one row per category, one column per mode."""
    groups: dict[str, list[str]] = {}
    for field in sent():
        groups.setdefault(category(field), []).append(field)
    lines = [f"| what a device sends | {' | '.join(MODES)} |", f"|---|{'---|' * len(MODES)}"]
    for kind, about in ABOUT.items():
        cells = [protected(kind, mode) for mode in MODES.values()]
        lines.append(f"| {about} | {' | '.join(cells)} |")
    lines += ["", *(f"- {ABOUT[kind]}: {', '.join(f'`{field}`' for field in groups[kind])}" for kind in ABOUT)]
    return "\n".join(lines) + "\n"
