"""Flags, and what the commands share in reading them."""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

MakeCommand = Callable[[str, Callable[[argparse.Namespace], None], str], argparse.ArgumentParser]


def asked_for(argv: list[str], *commands: str) -> bool:
    """Whether one of these commands was called: torch is imported only for those who need it."""
    return bool(argv) and argv[0] in commands


def add_flags(
    parser: argparse.ArgumentParser,
    title: str,
    kind: type,
    leave_out: Collection[str] = (),
    presets: Sequence[Mapping[str, Any]] = ({},),
) -> None:
    """presets: what each protocol sets, that of a plain run first."""
    group = parser.add_argument_group(title)
    kinds = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if field.name == "train" or field.name in leave_out:
            continue
        long, *short = flags(field)
        names = [f"--{long}", *(f"-{name}" for name in short)]
        options: dict[str, Any] = {
            "dest": field.name,
            "help": field.metadata.get("help", "").replace("%", "%%") + usually(field, presets),
        }
        if kinds[field.name] is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options |= {"type": reader(kinds[field.name]), "metavar": long.upper().replace("-", "_")}
        group.add_argument(*names, **options)


def usually(field: dataclasses.Field[Any], presets: Sequence[Mapping[str, Any]]) -> str:
    """What a plain run takes, in words, and whether another protocol takes something else."""
    values = [preset.get(field.name, field.default) for preset in presets]
    told = [] if values[0] in (None, ()) else [f"usually {values[0]}"]
    if any(value != values[0] for value in values):
        told.append("the protocol decides")
    return f" ({'; '.join(told)})" if told else ""


def flags(field: dataclasses.Field[Any]) -> tuple[str, ...]:
    """The long flag of a field, then its short ones; without dashes before them."""
    return tuple(field.metadata.get("flags", (field.name.replace("_", "-"),)))


def as_typed(kind: type, values: Mapping[str, Any]) -> list[str]:
    """The flags that set these of the dataclass's fields."""
    typed = []
    for field in dataclasses.fields(kind):
        value, long = values.get(field.name), flags(field)[0]
        if isinstance(value, bool):
            typed.append(f"--{long}" if value else f"--no-{long}")
        elif isinstance(value, tuple):
            typed.append(f"--{long}={','.join(f'{start}:{factor}' for start, factor in value)}")
        elif value is not None:
            typed.append(f"--{long}={value}")
    return typed


def reader(kind: Any) -> Callable[[str], Any]:
    """What turns the text of a flag into a value of this type."""
    if isinstance(kind, types.UnionType):
        kind = next(k for k in typing.get_args(kind) if k is not type(None))
    return kind if kind in (int, float, str) else steps


def steps(text: str) -> tuple[tuple[int, float], ...]:
    """Such as 50:0.2,75:0.02."""
    try:
        return tuple((int(a), float(b)) for a, b in (part.split(":") for part in text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not of the form ROUND:FACTOR,ROUND:FACTOR") from None


def given(chosen: argparse.Namespace, kind: type) -> dict[str, Any]:
    """The flags of this dataclass that were set."""
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in vars(chosen).items() if name in names}


def add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="FOLDER", help="folder to leave the run in; must not exist")
    parser.add_argument("--json", action="store_true", help="print the result as JSON, and nothing else")


def add_watch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--watch", type=int, metavar="PORT", help="show it live at http://127.0.0.1:PORT")


def add_track(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--track", metavar="NAMES", help="log to tensorboard, wandb or mlflow; several with commas")


def add_format(parser: argparse.ArgumentParser) -> None:
    from coterie.tables import FORMATS

    parser.add_argument(
        "--format", choices=FORMATS, help="form of the tables; if not terminal, nothing else is printed"
    )
