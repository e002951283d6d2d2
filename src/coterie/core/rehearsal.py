"""Try a method on a few samples before a run, and check what its functions return."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from coterie.core import random, ranges, tree
from coterie.core.batch import Data
from coterie.core.data import Transform
from coterie.core.errors import CoterieError
from coterie.core.forward import attention_for_vmap
from coterie.core.headless import HeadlessModel, needs_head
from coterie.core.method import AnyMethod, Census
from coterie.core.model import Model, Weights
from coterie.core.sharing import check_kept, norm_names, other_choice
from coterie.core.user_code import failure, users_lines
from coterie.core.wrapper import Around, innermost

SAMPLES = (4, 2)  # of two clients


def check_needs(method: AnyMethod, model: Model) -> None:
    """Refuse an optimizer, or a network without trainable weights in a part, that the method cannot use."""
    if method.needs_sgd and method.train.optimizer != "sgd":
        raise CoterieError(f"{method.title} needs optimizer=sgd, got {method.train.optimizer}: {method.needs_sgd}")
    if reason := method.refuses(method.train.rates):
        raise CoterieError(f"{method.title} does not support --schedule {method.train.schedule}: {reason}")
    if method.needs_classes and not model.task.one_class:
        raise CoterieError(
            f"{method.title} needs one class per sample, so it cannot be used for {model.task.name}; choose another "
            "method, such as fedavg, fedrep or ditto"
        )
    if (personal := other_choice(method)) is not None:
        check_kept(personal, model)
        return
    if method.needs_norm and not norm_names(model):
        raise CoterieError(
            f"{method.title} needs normalization layers that are trained, which this network does not have; choose a "
            "network with BatchNorm, GroupNorm or LayerNorm, or another method, such as fedavg"
        )
    if model.headless and (method.needs_head or method.needs_encoder):
        raise needs_head(method.title, model)
    for part, weights in model.start._asdict().items():
        if getattr(method, f"needs_{part}") and not tree.trained(weights):
            frozen = any(True for _ in getattr(model, part).parameters())
            what = "is frozen" if frozen else "has no parameters"
            raise CoterieError(
                f"{method.title} needs a {part} that it can train, but the {part} of this network {what}; "
                "unfreeze some of it, choose another head with head=... or --head, or another method"
            )


def rehearse(method: AnyMethod, model: Model, x: Tensor, y: Tensor) -> None:
    """One round of two clients with these samples (n, ...), (n,), of which each has a few. Nothing is kept."""
    check_needs(innermost(method), model)
    try:
        with torch.random.fork_rng(devices=[]):
            model = model.to(model.mean.device)
            Rehearsal(brief(method.rehearsed()), HeadlessModel.of(model) if model.headless else model, x, y).play()
    except CoterieError:
        raise
    except Exception as error:
        if not users_lines(error):
            raise
        raise failure(f"{type(innermost(method)).__name__} failed when it was tried on a few samples", error) from error


def brief(method: AnyMethod) -> AnyMethod:
    """The same with one epoch of local training, in small batches."""
    if isinstance(method, Around):
        return replace(method, inner=brief(method.inner))
    few = min(method.train.batch_size, min(SAMPLES))
    return replace(method, train=method.train.but(local_epochs=min(method.train.local_epochs, 1), batch_size=few))


class Rehearsal:
    def __init__(self, method: AnyMethod, model: Model, x: Tensor, y: Tensor) -> None:
        self.method, self.model, self.kind = method, model, type(innermost(method))
        self.clients = [self._data(x[:n], y[:n]) for n in SAMPLES]

    def play(self) -> None:
        method, model = self.method, self.model
        counts = torch.stack([data.counts for data in self.clients]).long()
        server = self._tree("server_init", method.server_init(model, Census(torch.tensor(SAMPLES), counts)))
        welcome = self._tree("server_welcome", method.server_welcome(server))
        downs = [self._message("server_send", method.server_send(server, torch.tensor(i))) for i in (0, 1)]
        self._alike("server_send", downs)
        states = [self._tree("client_init", method.client_init(model, data, welcome)) for data in self.clients]
        trained = [self._trained(*given) for given in zip(states, downs, self.clients, strict=True)]
        ups = [up for _, up in trained]
        self._alike("client_train", ups)
        for up, data in zip(ups, self.clients, strict=True):
            self._in_range(up, data)
        for before, (after, _) in zip(states, trained, strict=True):
            self._same_form("client_train", "client_init", before, after)
        for state, down, data in zip([state for state, _ in trained], downs, self.clients, strict=True):
            finished = self._tree("client_finish", method.client_finish(model, state, down, data))
            if type(finished) is not type(state):
                raise self._wrong("client_finish", f"must return {word(state)}, got {word(finished)}")
            with torch.no_grad():
                self._logits("client_predict", method.client_predict(model, finished, down, data.x), data)
        received = method.server_receive(server, torch.arange(2), tree.stack(ups))
        self._same_form("server_receive", "server_init", server, self._tree("server_receive", received))
        learned = method.server_train(model, received, random.server_key(0, 0))
        self._same_form("server_train", "server_init", server, self._tree("server_train", learned))
        for (state, _), down, data in zip(trained, downs, self.clients, strict=True):
            with torch.no_grad():
                self._logits("client_predict", method.client_predict(model, state, down, data.x), data)
        with torch.no_grad():
            logits = method.server_predict(model, server, self.clients[0].x)
        if logits is not None:
            self._logits("server_predict", logits, self.clients[0])

    def _data(self, x: Tensor, y: Tensor) -> Data:
        rate = torch.ones((), dtype=self.model.mean.dtype)
        return Data(x, y, random.seed_key(0), rate, known_classes(self.model), Transform(), alone=True)

    def _trained(self, state: Any, down: Any, data: Data) -> tuple[Any, Any]:
        made = self.method.client_train(self.model, state, down, data)
        if not isinstance(made, tuple) or hasattr(made, "_fields") or len(made) != 2:
            raise self._wrong("client_train", f"must return a pair (State, Up), got {word(made)}")
        return self._tree("client_train", made[0], "State"), self._message("client_train", made[1])

    def _tree(self, function: str, made: Any, name: str = "") -> Any:
        """Check that a tree holds only tensors and has the annotated type."""
        for path, leaf in stray(made, name or word(made)):
            raise self._wrong(
                function,
                f"returns {path} = {word(leaf)}; messages and states are named tuples or dictionaries of tensors "
                "(torch.tensor makes one of a number, () stands for nothing)",
            )
        expected = self._expected(function, "return", 0 if function == "client_train" else None)
        if expected is not None and not isinstance(made, expected):
            raise self._wrong(function, f"must return {expected.__name__}, got {word(made)}")
        return made

    def _message(self, function: str, made: Any) -> Any:
        if not hasattr(made, "_fields"):
            what = "Down" if function == "server_send" else "Up"
            raise self._wrong(function, f"must return {what} as a named tuple, got {word(made)}")
        for path, leaf in stray(made, type(made).__name__):
            raise self._wrong(function, f"sends {path} = {word(leaf)}; only tensors can be sent")
        if function == "server_send":
            expected = self._expected("client_train", "down") or self._expected(function, "return")
            reader = " to client_train"
        else:
            expected, reader = self._expected("server_receive", "ups") or self._expected(function, "return", 1), ""
        if expected is not None and not isinstance(made, expected):
            raise self._wrong(function, f"must send {expected.__name__}{reader}, got {word(made)}")
        return made

    def _expected(self, function: str, name: str, part: int | None = None) -> type | None:
        """The named tuple of an annotation, if any. Wrappers around a method have messages of their own."""
        if isinstance(self.method, Around):
            return None
        try:
            hint = typing.get_type_hints(getattr(self.kind, function)).get(name)
        except (NameError, TypeError, AttributeError):
            return None
        if part is not None:
            given = typing.get_args(hint)
            hint = given[part] if len(given) == 2 else None
        return hint if isinstance(hint, type) and hasattr(hint, "_fields") else None

    def _alike(self, function: str, messages: list[Any]) -> None:
        """Check that the messages of all clients have tensors of equal names, shapes and dtypes."""
        a, b = (forms(message) for message in messages)
        for name in [*a, *(b.keys() - a.keys())]:
            if a.get(name) != b.get(name):
                raise self._wrong(
                    function,
                    f"{type(messages[0]).__name__}.{name} is {a.get(name, 'missing')} for a client with {SAMPLES[0]} "
                    f"samples and {b.get(name, 'missing')} for one with {SAMPLES[1]}; it must be alike for all clients",
                )

    def _in_range(self, up: Any, data: Data) -> None:
        """What the type of an update declares must hold here; numbers that are not finite are left to the round."""
        known = ranges.Known(innermost(self.method), torch.tensor([len(data.y)]), limit=torch.inf)
        if bool(ranges.finite(up)) and (fault := ranges.fault(tree.apply(lambda t: t[None], up), known)):
            raise self._wrong("client_train", f"sends an update that its type does not allow: {fault}")

    def _same_form(self, function: str, first: str, before: Any, after: Any) -> None:
        """Check that a state keeps its names, dtypes and numbers of axes."""
        a, b = forms(before, sizes=False), forms(after, sizes=False)
        for name in [*a, *(b.keys() - a.keys())]:
            if a.get(name) != b.get(name):
                raise self._wrong(
                    function,
                    f"returns {name or word(after)} as {b.get(name, 'missing')}, but {first} made it "
                    f"{a.get(name, 'missing')}",
                )

    def _logits(self, function: str, made: Any, data: Data) -> None:
        needed = tuple(self.model(self.model.start, data.x).shape)
        if not isinstance(made, Tensor) or tuple(made.shape) != needed:
            raise self._wrong(function, f"must return {self.outputs} of shape {needed}, got {word(made)}")

    @property
    def outputs(self) -> str:
        return "logits" if self.model.classes else "outputs"

    def _wrong(self, function: str, what: str) -> CoterieError:
        return CoterieError(f"{self.kind.__name__}.{function} {what}")


def known_classes(model: Model) -> int:
    """K, if every sample has one class; otherwise 0."""
    return model.classes if model.task.one_class else 0


def stray(made: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Leaves of a tree that are not tensors, with their paths."""
    if isinstance(made, Tensor):
        return
    if isinstance(made, dict):
        branches = [(f"{path}.{name}", value) for name, value in made.items()]
    elif isinstance(made, tuple):
        names = getattr(made, "_fields", None) or range(len(made))
        branches = [(f"{path}.{name}", value) for name, value in zip(names, made, strict=True)]
    else:
        yield path, made
        return
    for name, value in branches:
        yield from stray(value, name)


def forms(made: Any, sizes: bool = True) -> dict[str, str]:
    """Dtype and shape of every tensor as text; without sizes, its number of axes."""
    return {name: shape_of(t) if sizes else f"{kind_of(t)} of {t.ndim} axes" for name, t in tree.items(made)}


def word(made: Any) -> str:
    """A value as text for a message."""
    if isinstance(made, Tensor):
        return f"a tensor, {shape_of(made)}"
    if hasattr(made, "_fields"):
        return type(made).__name__
    return f"{made!r} ({type(made).__name__})" if isinstance(made, int | float | str | None) else type(made).__name__


def shape_of(t: Tensor) -> str:
    return f"{kind_of(t)} {tuple(t.shape)}"


def kind_of(t: Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")


def vmap_problem(method: AnyMethod, model: Model, x: Tensor, y: Tensor) -> str:
    """Why vmap cannot compute clients of this method with this network, or ''. x, y: a few samples.

    Tries two clients with different numbers of samples, one of them padded.
    """
    method, most = brief(method.rehearsed()), max(SAMPLES)
    model = model.to(model.mean.device)  # a copy: a forward that keeps something would keep a tensor of vmap
    xs, ys = (torch.stack([t[:most]] * 2) for t in (x, y))
    reals = torch.arange(ys.shape[1]) < torch.tensor(SAMPLES)[:, None]  # (2, n)
    counts = torch.ones(2, known_classes(model), dtype=torch.int64)

    def held(x: Tensor, y: Tensor, real: Tensor) -> Data:
        rate = torch.ones((), dtype=model.mean.dtype)
        return Data(x, y, random.seed_key(0), rate, known_classes(model), Transform(), real)

    def plain(weights: Weights, x: Tensor) -> Tensor:
        return model(weights, x)

    def joined(*samples: Tensor) -> Any:
        return method.client_init(model, held(*samples), welcome)

    def trained(state: Any, down: Any, *samples: Tensor) -> tuple[Any, Tensor]:
        state, _ = method.client_train(model, state, down, held(*samples))
        state = method.client_finish(model, state, down, held(*samples))
        with torch.no_grad():
            return state, method.client_predict(model, state, down, samples[0])

    try:
        with torch.random.fork_rng(devices=[]), attention_for_vmap(model.mean.device):
            torch.func.vmap(plain)(tree.apply(torch.Tensor.detach, tree.stack([model.start] * 2)), xs)
            server = method.server_init(model, Census(torch.tensor(SAMPLES), counts))
            welcome = method.server_welcome(server)
            downs = torch.func.vmap(lambda client: method.server_send(server, client))(torch.arange(2))
            torch.func.vmap(trained)(torch.func.vmap(joined)(xs, ys, reals), downs, xs, ys, reals)
    except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
        return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
    return ""
