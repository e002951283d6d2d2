"""Which weights a client keeps for itself, by name, and which it shares.

Parts of a network are `Weights` with some of its names only. Names are those of `tree.flatten(model.start)`, such as
encoder.3.weight and head.bias; running statistics of BatchNorm are among them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field, fields
from typing import Any, NamedTuple

from torch import nn

from coterie.core.errors import CoterieError, some_of
from coterie.core.layers import NORMS
from coterie.core.model import Model, Weights
from coterie.core.names import matching
from coterie.core.tree import Live, Tree, flatten, is_statistic

WORDS = ("head", "encoder", "norm", "none")
HELP = "what a client keeps: head, encoder, norm, none, or names of weights or modules, such as 'blocks.3|fc'"
NOTHING = Weights({}, {})


def kept(default: str) -> str:
    """The field of a method for what a client keeps. default: what its paper keeps."""
    chosen: str = field(default=default, metadata={"help": HELP, "keeps": True})
    return chosen


def other_choice(method: Any) -> str | None:
    """The part that clients keep, if it differs from the method's paper."""
    choices = ((f, getattr(method, f.name)) for f in fields(method) if f.metadata.get("keeps"))
    return next((chosen for f, chosen in choices if chosen != f.default), None)


class Shares(NamedTuple):
    shared: Weights
    personal: Weights


def parts(personal: str, model: Model, weights: Weights | None = None) -> Shares:
    """The shared and the personal weights, of the initial model by default. personal: see `personal_names`."""
    return split(model.start if weights is None else weights, personal_names(personal, model))


def split(weights: Weights, personal: Iterable[str]) -> Shares:
    """The shared and the personal weights."""
    names = frozenset(personal)

    def part(kept: bool) -> Weights:
        trees = weights._asdict().items()
        return Weights(*({n: t for n, t in w.items() if (f"{name}.{n}" in names) is kept} for name, w in trees))

    return Shares(part(False), part(True))


def join(*shares: Weights) -> Weights:
    """The whole weights. Encoder or head is in training mode if any of its weights is trained here.

    BatchNorm writes into its running statistics then: those that are not trained here are copied, so they do not move.
    """

    def part(*trees: Tree) -> Tree:
        training = any(isinstance(w, Live) and w for w in trees)
        copied = [w if isinstance(w, Live) or not training else unmoved(w) for w in trees]
        whole = {n: t for w in copied for n, t in w.items()}
        return Live(whole) if training else whole

    return Weights(*map(part, *shares))


def unmoved(weights: Tree) -> Tree:
    return {n: t.clone() if is_statistic(n) else t for n, t in weights.items()}


def personal_names(personal: str, model: Model) -> tuple[str, ...]:
    """The names of the weights that stay with a client: those of a word of WORDS, or of patterns joined by |.

    Patterns are of names as here or as in the user's network, of weights or modules, such as 'encoder.3|fc'.
    """
    names = tuple(flatten(model.start))
    if personal == "norm":
        return norm_names(model)
    if personal in WORDS:
        return tuple(name for name in names if name.startswith(f"{personal}."))
    theirs = {own_name(name, model): name for name in names}
    picked = matching("weights to keep", personal, tuple({*names, *theirs}))
    if two := [name for name in picked if name in names and theirs.get(name, name) != name]:
        raise CoterieError(f"personal '{personal}': {two[0]} is the name of two weights; rename the module")
    chosen = {theirs.get(name, name) for name in picked}
    return tuple(name for name in names if name in chosen)


def check_kept(personal: str, model: Model) -> None:
    """Raise an error if `personal` selects nothing that is trained, or the whole network."""
    names = personal_names(personal, model)
    if not names and personal == "norm":
        raise CoterieError("personal 'norm' needs a network with normalization layers that are trained")
    if not names and personal != "none":
        raise CoterieError(f"personal '{personal}': the {personal} of this network has nothing to train")
    if len(names) == len(flatten(model.start)):
        raise CoterieError(
            f"personal '{personal}' matches all weights of the network ({some_of(names)}), so there is nothing to "
            "share; choose fewer, or method local"
        )


def own_name(name: str, model: Model) -> str:
    """The name of a weight in the user's network."""
    part, _, rest = name.partition(".")
    inside = part == "encoder" or rest.startswith(f"{model.head_name}.")
    return rest if inside else f"{model.head_name}.{rest}"


def norm_names(model: Model) -> tuple[str, ...]:
    """The weights and running statistics of normalization layers."""
    parts = (("encoder", model.encoder), ("head", model.head))
    layers = [f"{part}.{name}." if name else f"{part}." for part, module in parts for name in norms(module)]
    return tuple(name for name in flatten(model.start) if name.startswith(tuple(layers)))


def norms(module: nn.Module) -> Iterable[str]:
    return (name for name, layer in module.named_modules() if isinstance(layer, NORMS))
