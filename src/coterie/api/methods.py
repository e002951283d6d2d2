"""Which method a federation runs, by the names that a user gives, and what the protocol adds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from coterie.core.errors import CoterieError, unknown
from coterie.core.local import Sgd
from coterie.federation import Safety, Settings
from coterie.methods import METHODS, VARIANTS, AnyMethod, parts
from coterie.protocols import method_preset, preset


def method_name(name: str) -> str:
    """The name of a method or variant, whichever way it is spelled: FedPAC, fed_pac, Fed-RoD."""

    def letters(word: str) -> str:
        return "".join(letter for letter in word.lower() if letter.isalnum())

    known = {letters(word): word for word in (*METHODS, *VARIANTS)}
    if letters(name) not in known:
        raise unknown("method", name, known.values())
    return known[letters(name)]


def make_method(name: str, **settings: Any) -> AnyMethod:
    """A method by name; settings are fields of the method or of its local training."""
    name = method_name(name)
    base, changes = parts(name)
    kind = METHODS[base]
    own = {f.name for f in fields(kind)} - {"train"}
    training = {f.name for f in fields(Sgd)}
    for setting in settings:
        if setting not in own | training:
            raise unknown(f"setting of {name}", setting, own | training)
    train = Sgd(**{k: v for k, v in settings.items() if k in training})
    return kind(train=train, **changes | {k: v for k, v in settings.items() if k in own})


def choose(
    method: str | AnyMethod, protocol: str, data: str, shape: tuple[int, ...], settings: Mapping[str, Any]
) -> tuple[AnyMethod, Settings, Safety, str]:
    """Method, federation, safety and the usual model, from what was said and what the protocol says."""
    usual = preset(protocol, data, shape)
    federation_names = {f.name for f in fields(Settings)}
    federation = Settings(**{k: v for k, v in {**usual, **settings}.items() if k in federation_names})
    safety_names = {f.name for f in fields(Safety)}
    safety = Safety(**{k: v for k, v in settings.items() if k in safety_names})
    own = {k: v for k, v in settings.items() if k not in federation_names | safety_names}
    if isinstance(method, str):
        training = {f.name for f in fields(Sgd)}
        method = method_name(method)
        base, changes = parts(method)
        presets = {k: v for k, v in usual.items() if k in training} | method_preset(protocol, base)
        method = make_method(method, **presets | changes | own)
    elif own:
        raise CoterieError(f"{', '.join(own)}: settings of a method that is made already; give them when making it")
    return method, federation, safety, usual["model"]
