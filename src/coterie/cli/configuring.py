"""Settings of commands from a YAML file, and back: --config and --save-config."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.cli.flags import given, model_args, over, run_settings

if TYPE_CHECKING:
    from coterie.core.data import FederatedData

ASK = {
    "run": "give a METHOD, such as: coterie run fedpac, or a file with one: --config FILE",
    "compare": "give methods, such as: coterie compare fedavg fedpac, or a file with them: --config FILE",
}


def add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="YAML file with settings; flags override them")
    parser.add_argument("--save-config", metavar="FILE", help="write the settings in force to a new YAML file")


def configured_method(argv: list[str]) -> list[str]:
    """The method that the file of --config names, for its flags; an empty list if there is none."""
    from coterie.api.configuration import read

    for word, following in zip(argv, [*argv[1:], ""], strict=False):
        flag, equals, value = word.partition("=")
        if flag == "--config":
            method = read(Path(value if equals else following)).get("method")
            return [method] if isinstance(method, str) else []
    return []


def configured(chosen: argparse.Namespace, command: str) -> argparse.Namespace:
    """The flags, with the settings of --config for those that are not given."""
    from coterie.core.errors import CoterieError

    found = argparse.Namespace(**from_file(chosen, command) | vars(chosen))
    vars(found).pop("config", None)
    named = getattr(found, "method" if command == "run" else "methods", None)
    if named is None or named == []:
        raise CoterieError(ASK[command])
    for word in named if command == "compare" else ():
        if "=" in word:
            raise CoterieError(f"'{word}' is not a method; to vary a setting, write --over {word}")
    return found


def from_file(chosen: argparse.Namespace, command: str) -> dict[str, Any]:
    """The file's settings as flags give them."""
    from coterie.api.configuration import checked, read
    from coterie.api.variations import word

    if not hasattr(chosen, "config"):
        return {}
    path = Path(chosen.config)
    found = checked(path, read(path), command, getattr(chosen, "method", None))
    flags = {**found.given, **found.data, **found.execution}
    if "model_args" in flags:
        flags["model_args"] = list(flags["model_args"].items())
    if isinstance(flags.get("track"), list):
        flags["track"] = ",".join(map(str, flags["track"]))
    if "over" in flags:
        texts = {n: ",".join(map(word, v)) if isinstance(v, list) else word(v) for n, v in flags["over"].items()}
        flags["over"] = [f"{name}={text}" for name, text in texts.items()]
    return flags


def save_config(chosen: argparse.Namespace, data: FederatedData) -> None:
    """Write the file of --save-config, if it is given."""
    if not hasattr(chosen, "save_config"):
        return
    from coterie.api import DataSettings, Execution
    from coterie.api.saved_config import data_in_force, run_in_force, write_config
    from coterie.api.settings import SETTINGS

    flags = vars(chosen)
    kept = {name: flags[name] for name in ("model", "head", "train_only", "track") if flags.get(name) is not None}
    arguments = {"model_args": found} if (found := model_args(chosen)) else {}
    execution = {"backend": found} if (found := given(chosen, Execution)) else {}
    protocol = flags.get("protocol") or DataSettings.protocol
    about = {"data": data_in_force(given(chosen, DataSettings), data), **arguments, **execution}
    if "methods" in flags:
        own: dict[str, Any] = {name: flags[name] for name in ("seeds", "against") if name in flags}
        own |= {"over": over(flags["over"])} if "over" in flags else {}
        same = {name: value for name, value in flags.items() if name in SETTINGS}
        content = {"methods": list(flags["methods"]), **own, "protocol": protocol}
        write_config(Path(chosen.save_config), "compare", {**content, **about, **kept, **same})
        return
    force = run_in_force(chosen.method, data, protocol, run_settings(chosen, chosen.method))
    write_config(Path(chosen.save_config), "run", {"method": chosen.method, **about, **force, **kept})
