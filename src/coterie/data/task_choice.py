"""The task and metric of a federation, as the user chooses them."""

from __future__ import annotations

import ast
import inspect
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.core.data import FederatedData, Split, Transform
from coterie.core.errors import CoterieError, some_of, unknown
from coterie.core.packing import unpack
from coterie.core.task import Task
from coterie.core.tasks import NextToken, task_class
from coterie.core.validation import PLAIN, fits


def with_task(
    data: FederatedData,
    task: str | type[Task] | Task | None = None,
    metric: str | None = None,
    options: Mapping[str, Any] | str | None = None,
) -> FederatedData:
    """The data with this task, fitted to the training labels. What does not fit is an error.

    task: default: that of the data. options: arguments of its constructor.
    """
    given = by_number(read_options(options), data.class_names)
    given |= {} if metric is None else {"metric": metric}
    if data.class_names and given.get("classes", len(data.class_names)) != len(data.class_names):
        raise CoterieError(
            f"option classes is {given['classes']}, but the labels have {len(data.class_names)} classes: "
            f"{some_of(data.class_names)}; leave the option out"
        )
    if isinstance(task, Task):
        made = made_by(type(task), {**task.options, **given}) if given else task
    elif task is None or task_class(task) is type(data.task):
        made = made_by(type(data.task), {**data.task.options, **given}) if given else data.task
    else:
        made = fitted(task_class(task), data.train, data.transform, data.classes, given)
    for name in ("train", "test", "validation"):
        split = getattr(data, name)
        if split is not None:
            made.check_labels(split.y, f"{data.name}, {name}")
    if made.class_axis is not None and data.train.y.numel() and not (data.train.y >= 0).any():
        raise CoterieError(f"{data.name}, train: all labels are ignored (-1), so there is nothing to learn")
    return replace(data, classes=made.classes if made.one_class else 0, task=made)


def fitted(kind: type[Task], train: Split, transform: Transform, classes: int, options: Mapping[str, Any]) -> Task:
    """The task of training labels. classes: names of classes, or distinct labels in all splits."""
    if kind is NextToken:
        x = tokens_of(train, transform)
        classes = max(classes, int(x.max()) + 1 if x.numel() and not x.is_floating_point() else 0)  # the vocabulary
    check_options(kind, options)
    return kind.fitted(train.y, classes, **options)


def tokens_of(train: Split, transform: Transform) -> Tensor:
    """The samples; of several inputs the integers of the shape of a label, such as token ids and their mask."""
    if not transform.inputs:
        return train.x
    inputs, shape = unpack(transform.inputs, train.x), tuple(train.y.shape[1:])
    found = [inputs[one.name] for one in transform.inputs if one.dtype == "int64" and one.shape == shape]
    return torch.stack(found) if found else train.x[:0]


def made_by(kind: type[Task], options: Mapping[str, Any]) -> Task:
    check_options(kind, options)
    return kind(**options)


def read_options(given: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """Options of a task: a mapping, or text such as loss=huber,class_weights=[1,3]."""
    if not isinstance(given, str):
        return dict(given or {})
    try:
        call = ast.parse(f"task({given})", mode="eval").body
        assert isinstance(call, ast.Call)
        if call.args or any(keyword.arg is None for keyword in call.keywords):
            raise ValueError
        return {str(word.arg): plain(word.value) for word in call.keywords}
    except (SyntaxError, ValueError, AssertionError):
        raise CoterieError(f"task options are NAME=VALUE,NAME=VALUE, such as loss=huber, got '{given}'") from None


def by_number(options: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Replace class names by class numbers in options: class_weights={no: 1, yes: 3} and positive=yes."""
    number = {name: k for k, name in enumerate(names)}
    if isinstance(weights := options.get("class_weights"), Mapping):
        own = {str(name): weight for name, weight in weights.items()}
        if own.keys() != number.keys():
            raise CoterieError(f"class_weights needs a number for each class: {', '.join(names)}; got {', '.join(own)}")
        options = {**options, "class_weights": [own[name] for name in names]}
    if (positive := options.get("positive")) is not None:
        if isinstance(positive, str) and positive not in number:
            raise unknown("class for positive", positive, names)
        options = {**options, "positive": number.get(str(positive), positive)}
    return options


def plain(node: ast.expr) -> Any:
    """The value of a literal; other names are text."""
    if isinstance(node, ast.Dict):
        return {plain(key): plain(value) for key, value in zip(node.keys, node.values, strict=True) if key is not None}
    return node.id if isinstance(node, ast.Name) else ast.literal_eval(node)


def check_options(kind: type[Task], options: Mapping[str, Any]) -> None:
    """Refuse options that the constructor of a task does not take, and values of another type than it names."""
    takes = inspect.signature(kind).parameters
    try:
        hints = typing.get_type_hints(kind.__init__)
    except (NameError, TypeError, AttributeError):  # annotations of a user's class that cannot be resolved
        hints = {}
    for name, value in options.items():
        if name in hints and not fits_hint(value, hints[name]):
            raise CoterieError(f"option {name} of task {kind.name} must be {in_words(hints[name])}, got {value!r:.60}")
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in takes.values()):
        return
    for name in options:
        if name not in takes:
            raise CoterieError(f"task {kind.name} has no option '{name}'; it has: {', '.join(takes) or 'none'}")


def fits_hint(value: object, hint: Any) -> bool:
    """Whether a value is of an annotated type: a number, text, a sequence of them, or one of several; others are."""
    if isinstance(hint, types.UnionType):
        return any(fits_hint(value, one) for one in typing.get_args(hint))
    if is_sequence(hint):
        inner, value = typing.get_args(hint)[0], value.tolist() if isinstance(value, np.ndarray | Tensor) else value
        return isinstance(value, Sequence) and not isinstance(value, str) and all(fits_hint(v, inner) for v in value)
    return hint not in PLAIN or fits(value, hint)


def is_sequence(hint: Any) -> bool:
    origin = typing.get_origin(hint)
    return isinstance(origin, type) and issubclass(origin, Sequence) and bool(typing.get_args(hint))


def in_words(hint: Any) -> str:
    if isinstance(hint, types.UnionType):
        return " or ".join(map(in_words, typing.get_args(hint)))
    if is_sequence(hint):
        return f"a list, each {in_words(typing.get_args(hint)[0])}"
    return PLAIN.get(hint, str(hint))
