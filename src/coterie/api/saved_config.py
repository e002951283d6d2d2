"""Write the settings in force as a YAML file from which `coterie run` and `coterie compare` repeat the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from coterie.api.data import RULE_SETTINGS, DataSettings, rule_settings
from coterie.api.methods import About, choose
from coterie.api.protocols import preset
from coterie.api.settings import RUN, names
from coterie.core.data import FederatedData
from coterie.core.errors import CoterieError
from coterie.core.version import VERSION
from coterie.data import PARTITIONS
from coterie.federation import Safety, Settings
from coterie.runs.disk import writing


def run_in_force(method: str, data: FederatedData, protocol: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """All settings of a run: given, or else the protocol's, or else the defaults.

    settings: that were given, of the federation, safety, ending, protection, encryption, local training and the method.
    """
    about = About(data.name, data.shape, data.num_clients)
    own = {name: value for name, value in settings.items() if name not in names(*RUN) - names(Settings, Safety)}
    chosen = choose(method, protocol, about, own)
    found = {f.name: getattr(chosen.federation, f.name) for f in fields(Settings)}
    train = {f.name: getattr(chosen.method.train, f.name) for f in fields(chosen.method.train)}
    found |= {name: value for name, value in train.items() if value is not None}
    for f in fields(chosen.method):
        value = getattr(chosen.method, f.name)
        if f.name != "train" and (value is not None or f.default not in (None, MISSING)):
            found[f.name] = value
    others = {name: value for name, value in settings.items() if name in names(*RUN) and name not in found}
    return {"model": chosen.model, "protocol": protocol, **found, **others}


def data_in_force(given: Mapping[str, Any], data: FederatedData) -> dict[str, Any]:
    """The data settings: given, or else those of the protocol for the partition."""
    wanted, shown = DataSettings(**given), {name: value for name, value in given.items() if name != "protocol"}
    rule = wanted.partition or (data.partition.name if data.partition is not None else "")
    if rule in PARTITIONS:
        usual = preset(wanted.protocol, data.name, data.shape, wanted.num_clients)
        found = rule_settings(wanted, rule, usual)
        shown |= {"partition": rule, **{name: found[name] for name in RULE_SETTINGS if name in found}}
    return {"dataset": wanted.dataset, **shown}


def write_config(path: Path, command: str, content: Mapping[str, Any]) -> None:
    """Write a new file. command: run or compare."""
    import yaml

    rest = "" if command == "run" else "\n# Settings that are not here are those of the protocol for each method."
    head = f"# Written by Coterie {VERSION}. `coterie {command} --config {path.name}` repeats this.{rest}\n"
    text = yaml.safe_dump(plain(content), sort_keys=False, allow_unicode=True, default_flow_style=None, width=120)
    with writing(path):
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(head + text)
        except FileExistsError:
            raise CoterieError(f"{path} exists already; name another file with --save-config, or remove it") from None


def plain(value: Any) -> Any:
    """Tuples as lists, paths as text, and nothing that is not given."""
    if isinstance(value, Mapping):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return str(value) if isinstance(value, Path) else value
