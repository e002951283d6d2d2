"""Which tensors of BatchNorm are sent: all, all but the running statistics, or none.

`KeptNorms` wraps any method. It removes the tensors that stay with a client from the messages, and fills in the
client's own values, those at the end of its last training, where the client reads a message. To the server these
tensors never change, so what it computes from models (means, distances, clusters) depends on the others only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack  # None outside of vmap

from coterie.core import tree
from coterie.core.batch import Data
from coterie.core.errors import CoterieError, unknown
from coterie.core.layers import Norm
from coterie.core.method import AnyMethod, Census
from coterie.core.model import Model
from coterie.core.tree import Tree
from coterie.core.wrapper import Around

AVERAGED, LOCAL_STATISTICS, LOCAL = POLICIES = ("averaged", "local-statistics", "local")
WORDS = {
    AVERAGED: "weights and running statistics of BatchNorm are sent and averaged like all weights",
    LOCAL_STATISTICS: "running statistics of BatchNorm stay with each client; its weights are sent and averaged",
    LOCAL: "BatchNorm layers stay with each client, weights and running statistics",
}
LEAVE_OUT = "choose another policy or another method"


class KeptTensor(NamedTuple):
    """A tensor in a message that stays with the client."""

    path: tuple[str, ...]  # fields and keys down to the dictionary that holds it
    key: str  # its key there
    name: str  # of the tensor in the network
    shape: tuple[int, ...]  # with axes in front where a message holds several networks, such as those of a mixture

    def __str__(self) -> str:
        return ".".join((*self.path, self.key))


class Kept(NamedTuple):
    """A client's state."""

    state: Any  # of the inner method
    norms: Tree  # place -> the client's own tensor


@dataclass(frozen=True)
class KeptNorms(Around):
    """A method in which some tensors of BatchNorm stay with each client. `keep_norms` makes it."""

    lasts: ClassVar[bool] = True

    policy: str = field(kw_only=True)
    names: tuple[str, ...] = field(kw_only=True)  # of the tensors that clients keep
    places: tuple[KeptTensor, ...] = field(kw_only=True)  # in Down and in Up
    welcomed: tuple[KeptTensor, ...] = field(kw_only=True)  # in the welcome
    rehearsing: bool = field(default=False, kw_only=True)  # whether to check the method

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.places:
            object.__setattr__(self, "personal_is_global", False)  # every client has statistics of its own

    def server_welcome(self, server: Any) -> Tree:
        welcome: Tree = without(self.inner.server_welcome(server), self.welcomed)
        return welcome

    def server_send(self, server: Any, client: Tensor) -> Any:
        return without(self.inner.server_send(server, client), self.places)

    def server_greet(self, server: Any) -> Any:
        down = self.inner.server_greet(server)
        return down if down is None else without(down, self.places)

    def server_receive(self, server: Any, clients: Tensor, ups: Any) -> Any:
        """Fill in the tensors that clients keep as the server sent them, so that they do not change."""

        def unmoved(client: Tensor) -> Tree:
            return read(self.inner.server_send(server, client), self.places)

        if self.stackable:
            rows = torch.func.vmap(unmoved)(clients) if self.places else {}
        else:
            rows = tree.stack([unmoved(client) for client in clients])
        return self.inner.server_receive(server, clients, filled(ups, self.places, rows))

    def server_predict(self, model: Model, server: Any, x: Tensor) -> Tensor | None:
        """A global model would lack what clients keep."""
        return None if self.places else self.inner.server_predict(model, server, x)

    def rehearsed(self) -> AnyMethod:
        return replace(self, inner=self.inner.rehearsed(), rehearsing=True)

    def client_init(self, model: Model, data: Data, welcome: Tree) -> Kept:
        welcome = filled(welcome, self.welcomed, initial(model, self.welcomed))
        if self.rehearsing and peek_interpreter_stack() is None:
            plain = self.inner.but(train=self.inner.train.but(keep_momentum=False))
            self._check_state(model, plain.client_init(model, data, welcome))
        return Kept(self.inner.client_init(model, data, welcome), initial(model, self.places))

    def client_train(self, model: Model, state: Kept, down: Any, data: Data) -> tuple[Kept, Any]:
        own, up = self.inner.client_train(model, state.state, self._filled(down, state), data)
        self._check_up(up)
        return Kept(own, read(up, self.places)), without(up, self.places)

    def client_finish(self, model: Model, state: Kept, down: Any, data: Data) -> Kept:
        finished = self.inner.client_finish(model, state.state, self._filled(down, state), data)
        return state._replace(state=finished)

    def client_predict(self, model: Model, state: Kept, down: Any, x: Tensor) -> Tensor:
        return self.inner.client_predict(model, state.state, self._filled(down, state), x)

    def _filled(self, down: Any, state: Kept) -> Any:
        return filled(down, self.places, state.norms)

    def _check_state(self, model: Model, state: Any) -> None:
        """Refuse methods whose clients hold corrections of their weights towards those of other clients."""
        found = tuple(find(state, {place.name for place in self.places}))
        odd = differing(read(state, found), initial(model, found))
        if odd is not None:
            reason = f"its clients correct their weights by '{odd}', which relies on averaged weights"
            raise refusal(self, self.policy, reason)

    def _check_up(self, up: Any) -> None:
        """Require that clients send back what they receive: their own values are read from there."""
        sent = {str(place): place.shape for place in find(up, self.names)}
        received = {str(place): place.shape for place in self.places}
        for name in sorted(name for name in sent | received if sent.get(name) != received.get(name)):
            way = "send back what they receive as" if name in received else "receive what they send as"
            raise refusal(self, self.policy, f"clients do not {way} '{name}', so it is unknown what they keep")


def keep_norms(method: AnyMethod, policy: str, model: Model) -> AnyMethod:
    """The method with this policy for BatchNorm. Raises `CoterieError` where network or method do not allow it."""
    check_policy(policy)
    if policy == AVERAGED:
        return method
    names = kept_names(policy, model)
    if not names:
        what = "BatchNorm layers that are trained" if policy == LOCAL else "BatchNorm layers with running statistics"
        raise CoterieError(f"batchnorm={policy} needs {what}, and this network has none; leave it out")
    down, welcome = first_messages(method, marked(model, names))
    places, welcomed = tuple(find(down, names)), tuple(find(welcome, names))
    if places and method.trains_on_server:
        raise refusal(method, policy, "its server trains with the clients' models, which would lack what clients keep")
    for message, found in ((down, places), (welcome, welcomed)):
        odd = differing(read(message, found), initial(marked(model, names), found))
        if odd is not None:
            raise refusal(method, policy, f"its server sends '{odd}', which is not the initial weight of that name")
    return KeptNorms(inner=method, policy=policy, names=names, places=places, welcomed=welcomed)


def check_policy(policy: str) -> None:
    if policy not in POLICIES:
        raise unknown("batchnorm", policy, POLICIES)


def refusal(method: AnyMethod, policy: str, reason: str) -> CoterieError:
    return CoterieError(f"{method.title} does not support batchnorm={policy}: {reason}; {LEAVE_OUT}")


def kept_names(policy: str, model: Model) -> tuple[str, ...]:
    """The tensors of the network that stay with a client."""
    names = tuple(tree.flatten(model.start))
    if policy == AVERAGED:
        return ()
    if policy == LOCAL_STATISTICS:
        return tuple(filter(tree.is_statistic, names))
    layers = tuple(norm_layers(model))
    return tuple(name for name in names if name.startswith(layers))


def norm_layers(model: Model) -> Iterator[str]:
    """Prefixes of the names of BatchNorm's tensors, and of those of other layers with running statistics."""
    for part, module in (("encoder", model.encoder), ("head", model.head)):
        for name, layer in module.named_modules():
            if isinstance(layer, Norm) and (is_batch_norm(layer) or layer.running_mean is not None):
                yield f"{part}.{name}." if name else f"{part}."


def is_batch_norm(layer: nn.Module) -> bool:
    return isinstance(layer, nn.modules.batchnorm._BatchNorm)


def marked(model: Model, names: Iterable[str]) -> Model:
    """The model with other initial numbers in these tensors, which distinguishes them from controls and moments."""
    flat = tree.flatten(model.start)
    moved = {name: flat[name] + torch.linspace(0.5, 1.5, flat[name].numel()).view_as(flat[name]) for name in names}
    return replace(model, start=tree.fill(model.start, flat | moved))


def first_messages(method: AnyMethod, model: Model) -> tuple[Any, Tree]:
    """What the server sends to a client in the first round, and when it joins."""
    classes = model.classes if model.task.one_class else 0
    server = method.server_init(model, Census(torch.tensor([2, 2]), torch.ones(2, classes, dtype=torch.int64)))
    return method.server_send(server, torch.tensor(0)), method.server_welcome(server)


def initial(model: Model, places: Iterable[KeptTensor]) -> Tree:
    """What a client keeps before its first training: the initial tensors of the network."""
    start = tree.flatten(model.start)
    return {str(place): start[place.name].expand(place.shape) for place in places}


def differing(tensors: Tree, start: Tree) -> str | None:
    """The first that does not have the initial values; None: all have."""
    return next((name for name, t in tensors.items() if not torch.allclose(t, start[name])), None)


def find(message: Any, names: Iterable[str]) -> Iterator[KeptTensor]:
    """The tensors in the dictionaries of a message that have, at the end of their dotted names, one of these names."""
    known = set(names)
    parts = {name.count(".") for name in known}

    def walk(node: Any, path: tuple[str, ...]) -> Iterator[KeptTensor]:
        for key, branch in branches(node):
            if not isinstance(branch, Tensor):
                yield from walk(branch, (*path, key))
            elif isinstance(node, dict):
                words = ".".join((*path, key)).split(".")
                name = next((n for n in (".".join(words[-1 - count :]) for count in parts) if n in known), None)
                if name is not None:
                    yield KeptTensor(path, key, name, tuple(branch.shape))

    return walk(message, ())


def branches(node: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(node, dict):
        return node.items()
    names = getattr(node, "_fields", None) or [str(i) for i in range(len(node))]
    return zip(names, node, strict=True)


def rebuilt(node: Any, held: Iterable[tuple[str, Any]]) -> Any:
    """A node of this type with other branches."""
    if isinstance(node, dict):
        return dict(held)
    values = [branch for _, branch in held]
    return type(node)(*values) if hasattr(node, "_fields") else tuple(values)


def without(message: Any, places: Iterable[KeptTensor]) -> Any:
    """The message without the tensors at these places."""
    gone = {(place.path, place.key) for place in places}

    def walk(node: Any, path: tuple[str, ...]) -> Any:
        if isinstance(node, Tensor) or not gone:
            return node
        left = [(key, branch) for key, branch in branches(node) if (path, key) not in gone]
        return rebuilt(node, [(key, walk(branch, (*path, key))) for key, branch in left])

    return walk(message, ())


def filled(message: Any, places: Iterable[KeptTensor], tensors: Tree) -> Any:
    """The message with these tensors at their places."""
    missing: dict[tuple[str, ...], Tree] = {}
    for place in places:
        missing.setdefault(place.path, {})[place.key] = tensors[str(place)]

    def walk(node: Any, path: tuple[str, ...]) -> Any:
        if isinstance(node, Tensor) or not missing:
            return node
        held = [(key, walk(branch, (*path, key))) for key, branch in branches(node)]
        return rebuilt(node, [*held, *missing.get(path, {}).items()])

    return walk(message, ())


def read(message: Any, places: Iterable[KeptTensor]) -> Tree:
    """The tensors at these places, by their dotted names."""
    found = {}
    for place in places:
        node = message
        for step in place.path:
            node = dict(branches(node))[step]
        found[str(place)] = node[place.key]
    return found
