"""What config.json says, checked, and the objects that it stands for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from coterie.core.errors import CoterieError
from coterie.core.local import Sgd
from coterie.methods import METHODS, AnyMethod

NEEDED: dict[str, dict[str, Any]] = {
    "method": {"name": str, "train": dict},
    "network": {"name": str | None, "head": str | None},
    "federation": {"rounds": int, "seed": int},
    "data": {
        "name": str,
        "clients": int,
        "classes": int,
        "class_names": list,
        "shape": list,
        "dtype": str,
        "train_sizes": list,
        "test_sizes": list,
        "transform": dict,
        "partition": dict | None,
    },
}


def check_config(path: Path, config: Any) -> None:
    for part, names in NEEDED.items():
        found = config.get(part) if isinstance(config, dict) else None
        told = found if isinstance(found, dict) else {}
        wrong = [n for n, kind in names.items() if not isinstance(told.get(n, ...), kind) or isinstance(told[n], bool)]
        if wrong:
            raise CoterieError(
                f"{path / 'config.json'}: what it says of {part} lacks {', '.join(wrong)}; it is damaged, "
                "or of a version of Coterie that did not write it"
            )
    if not agrees(config["data"]):
        raise CoterieError(f"{path / 'config.json'}: what it says of data does not agree; it is damaged")


def agrees(data: Mapping[str, Any]) -> bool:
    """Whether what is said of the data can be."""
    whole = (*data["shape"], *data["train_sizes"], *data["test_sizes"], data["clients"], data["classes"])
    return (
        all(type(number) is int and number >= 0 for number in whole)
        and len(data["train_sizes"]) == data["clients"] > 0
        and ids_agree(data.get("ids"), data["clients"])
        and len(data["class_names"]) in (0, data["classes"])
        and all(isinstance(name, str) for name in data["class_names"])
        and isinstance(getattr(torch, data["dtype"], None), torch.dtype)
        and all(numbers(data["transform"].get(name)) for name in ("mean", "std"))
    )


def ids_agree(ids: Any, clients: int) -> bool:
    """Of the clients of a device."""
    if ids is None:
        return True
    whole = isinstance(ids, list) and all(type(number) is int and number >= 0 for number in ids)
    return whole and len(set(ids)) == len(ids) == clients


def numbers(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, float | int) for v in value)


def made_method(told: Mapping[str, Any]) -> AnyMethod:
    """From what config.json says of it."""
    kind = next((kind for kind in METHODS.values() if kind.title == told["name"]), None)
    if kind is None:
        raise CoterieError(f"the method '{told['name']}' is not one of Coterie's, so its models cannot be used here")
    known = {f.name for f in fields(kind)}
    settings = {name: as_tuples(value) for name, value in told.items() if name != "name"}
    if set(settings) != known:
        raise CoterieError(
            f"{told['name']} has other settings now than when it was run: {', '.join(sorted(known ^ set(settings)))}"
        )
    return kind(**settings | {"train": Sgd(**told["train"])})


def as_tuples(value: Any) -> Any:
    """JSON has no tuples."""
    if isinstance(value, dict):
        return {name: as_tuples(part) for name, part in value.items()}
    return tuple(map(as_tuples, value)) if isinstance(value, list) else value
