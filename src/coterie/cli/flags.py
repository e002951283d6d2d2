"""Flags: made from dataclasses, or shared by commands."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

MakeCommand = Callable[[str, Callable[[argparse.Namespace], None], str], argparse.ArgumentParser]

METHOD_HELP = "a name that `coterie methods` lists, or package.module:Class for your own method"


def asked_for(argv: list[str], *commands: str) -> bool:
    """Whether one of these commands was called. Only these import torch for their flags."""
    return bool(argv) and argv[0] in commands


def add_flags(
    parser: argparse.ArgumentParser,
    title: str,
    kind: type,
    leave_out: Collection[str] = (),
    presets: Sequence[Mapping[str, Any]] = ({},),
) -> None:
    """Add a flag for each field. presets: what each protocol sets, the default protocol first."""
    group = parser.add_argument_group(title)
    kinds = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if field.name == "train" or field.name in leave_out:
            continue
        long = flag(field)
        names = [f"--{long}", *(f"-{name}" for name in field.metadata.get("short", ()))]
        options: dict[str, Any] = {
            "dest": field.name,
            "help": field.metadata.get("help", "").replace("%", "%%") + default_text(field, presets),
        }
        if kinds[field.name] is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options |= {"type": reader(kinds[field.name]), "metavar": long.upper().replace("-", "_")}
        group.add_argument(*names, **options)


def default_text(field: dataclasses.Field[Any], presets: Sequence[Mapping[str, Any]]) -> str:
    """Such as: "; default: 5 (set by --protocol)", where protocols differ."""
    if field.metadata.get("required"):
        return "; required"
    values = [preset.get(field.name, field.default) for preset in presets]
    varies = any(value != values[0] for value in values)
    if values[0] in (None, ()):
        return "; default: set by --protocol" if varies else ""
    shown = f"{values[0]:g}" if isinstance(values[0], float) else values[0]
    return f"; default: {shown}{' (set by --protocol)' if varies else ''}"


def flag(field: dataclasses.Field[Any]) -> str:
    """The long flag of a field, without the leading dashes."""
    return field.name.replace("_", "-")


def as_typed(kind: type, values: Mapping[str, Any]) -> list[str]:
    """The flags that set fields of the dataclass to these values."""
    typed = []
    for field in dataclasses.fields(kind):
        value, long = values.get(field.name), flag(field)
        if isinstance(value, bool):
            typed.append(f"--{long}" if value else f"--no-{long}")
        elif value is not None:
            typed.append(f"--{long}={value}")
    return typed


def reader(kind: Any) -> Callable[[str], Any]:
    """A function from the text of a flag to a value of this type."""
    if isinstance(kind, types.UnionType):
        if {int, str} <= set(typing.get_args(kind)):
            return number_or_word
        if {float, str} <= set(typing.get_args(kind)):
            return share_or_names
        kind = next(k for k in typing.get_args(kind) if k is not type(None))
    assert kind in (int, float, str)
    return kind  # type: ignore[no-any-return]


def number_or_word(text: str) -> int | str:
    return int(text) if text.removeprefix("-").isdecimal() else text


def share_or_names(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def model_argument(text: str) -> tuple[str, Any]:
    """A name and a Python literal, such as hidden=64; other values are text."""
    name, found, value = text.partition("=")
    if not found or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, such as hidden=64, got '{text}'")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def add_model_args(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model-args",
        nargs="+",
        type=model_argument,
        metavar="NAME=VALUE",
        help="arguments of the model's constructor",
    )


def add_train_only(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--train-only",
        metavar="PATTERN",
        help="parameters or modules to train, such as 'head|blocks.11.*'; all others are frozen and not sent",
    )


def model_args(chosen: argparse.Namespace) -> dict[str, Any]:
    """The arguments that --model-args gives."""
    return dict(getattr(chosen, "model_args", None) or ())


def given(chosen: argparse.Namespace, kind: type) -> dict[str, Any]:
    """The fields of this dataclass that flags set."""
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in vars(chosen).items() if name in names}


def run_settings(chosen: argparse.Namespace, method: str) -> dict[str, Any]:
    """The settings of `coterie.run` that flags set, including those of this method."""
    from coterie.api import make_method
    from coterie.api.settings import GROUPS

    kinds = (*GROUPS.values(), type(make_method(method)))
    return {name: value for kind in kinds for name, value in given(chosen, kind).items()}


def over(words: Sequence[str]) -> dict[str, str]:
    """Setting -> values as text, from words such as lr=0.01,0.1."""
    from coterie.core.errors import CoterieError

    found: dict[str, str] = {}
    for word in words:
        name, equals, values = word.partition("=")
        if not equals or not name:
            raise CoterieError(f"--over takes settings such as lr=0.01,0.1; '{word}' is not one")
        if name in found:
            raise CoterieError(f"{name} is given twice; give all its values at once, such as {name}=1,2,3")
        found[name] = values
    return found


def add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="FOLDER", help="a new folder for the run; default: runs/TIME-METHOD-DATASET")
    parser.add_argument("--json", action="store_true", help="print the result as JSON, and nothing else")


def add_exist(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--exist",
        choices=("error", "resume", "replace"),
        help="where --out exists: error; resume: continue or extend it; replace: train again, and replace it at the "
        "end; default: error",
    )


def add_watch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--watch", type=int, metavar="PORT", help="show progress live at http://127.0.0.1:PORT")


def add_trust(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trust-code", action="store_true", help="import the code that the folder names")


def add_track(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--track", metavar="NAMES", help="log to tensorboard, wandb or mlflow, separated by commas")


def add_max_time(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-time", metavar="TIME", help="stop after this time, such as 25m; the same command continues"
    )


def add_format(parser: argparse.ArgumentParser) -> None:
    from coterie.analysis.tables import FORMATS

    parser.add_argument(
        "--format",
        choices=FORMATS,
        help="format of tables; all but terminal print nothing else to stdout; default: terminal",
    )
