"""The method of a federation, by the name that a user gives, with the settings that the protocol adds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, NamedTuple

from coterie.analysis.lookup import ancestor, checked_class, method_class, method_name, parts
from coterie.api.protocols import method_preset, preset
from coterie.api.settings import check_settings
from coterie.core.errors import CoterieError
from coterie.core.method import AnyMethod
from coterie.core.training import LocalTraining
from coterie.core.user_code import failure
from coterie.federation import Safety, Settings

FEDERATION = frozenset(f.name for f in fields(Settings))


class About(NamedTuple):
    """What a protocol's settings depend on."""

    dataset: str
    shape: tuple[int, ...]  # of a sample
    num_clients: int


class Chosen(NamedTuple):
    """The parts of a run, as given or else as the protocol sets them."""

    method: AnyMethod
    federation: Settings
    safety: Safety
    model: str  # the protocol's


def make_method(name: str, **settings: Any) -> AnyMethod:
    """A method by its name, or by the import path package.module:Class.

    settings: fields of the method or of its `LocalTraining`. `coterie.run` takes fields that are not given here from
    its protocol, as for a name.

    >>> make_method("fedpac", align=0.5, lr=0.1).train.lr
    0.1
    """
    name = method_name(name)
    kind, changes = method_class(name), parts(name)[1]
    check_settings(settings, kind, training_only=True)
    training = {f.name for f in fields(LocalTraining)}
    train = {k: v for k, v in settings.items() if k in training}
    own = changes | {k: v for k, v in settings.items() if k not in training}
    try:
        made = kind(**own)
        return made.but(train=made.train.but(**train)) if train else made
    except CoterieError:
        raise
    except Exception as error:
        if name.partition(":")[1]:
            raise failure(f"method '{name}' cannot be constructed", error) from error
        raise


def resolve(method: AnyMethod, protocol: str, about: About, settings: Mapping[str, Any] | None = None) -> AnyMethod:
    """The method with all its settings: given, or else the protocol's for this dataset, or else the defaults.

    settings: fields of the method and its local training that were given next to the method. A subclass takes the
    protocol's settings of the method that it derives from.
    """
    given, base = dict(settings or {}), ancestor(method)
    usual = preset(protocol, *about) | (method_preset(protocol, base, about.dataset) if base else {})
    own = [f.name for f in fields(method) if f.name != "train"]
    training = [f.name for f in fields(method.train)]
    for part, names in ((method, own), (method.train, training)):
        for name in given.keys() & part.explicit & set(names):
            if getattr(part, name) != given[name]:
                raise CoterieError(
                    f"{name} is set twice: {getattr(part, name)} in the method and {given[name]} in this call"
                )

    train = method.train.but(**{name: given[name] for name in training if name in given})

    def chosen(part: AnyMethod | LocalTraining, names: list[str]) -> dict[str, Any]:
        left = {name: usual[name] for name in names if name in usual and name not in part.explicit}
        return left | {name: given[name] for name in names if name in given}

    usual_here = chosen(train, [name for name in training if name not in train.tuned])
    return replace(method, train=replace(train, **usual_here), **chosen(method, own))


def federate(settings: Mapping[str, Any], usual: Mapping[str, Any]) -> Settings:
    """Settings of the federation: as given, or else as the protocol sets them.

    A last round with all clients is dropped where all take part in every round.
    """
    found = {k: v for k, v in {**usual, **settings}.items() if k in FEDERATION}
    if found.get("join_ratio", Settings.join_ratio) == 1 and "full_last_round" not in settings:
        found.pop("full_last_round", None)
    return Settings(**found)


def choose(method: str | AnyMethod, protocol: str, about: About, settings: Mapping[str, Any]) -> Chosen:
    """Method, federation, safety and the protocol's model, from the given settings and the protocol."""
    usual = preset(protocol, *about)
    named = method_name(method) if isinstance(method, str) else method
    kind = method_class(named) if isinstance(named, str) else checked_class(type(named).__name__, type(named))
    check_settings(settings, kind)
    safety_names = {f.name for f in fields(Safety)}
    safety = Safety(**{k: v for k, v in settings.items() if k in safety_names})
    own = {k: v for k, v in settings.items() if k not in FEDERATION | safety_names}
    if isinstance(named, str):
        made = resolve(make_method(named, **own), protocol, about)
    else:
        made = resolve(named, protocol, about, own)
    return Chosen(made, federate(settings, usual), safety, usual["model"])
