"""What a method is.

A method is a frozen dataclass of hyper-parameters with pure functions. Functions named `server_*` run on the server,
functions named `client_*` on ONE client; only the messages `Down` and `Up` cross between them. `Server` and `State` are
the states of each side: arguments and results, never kept on `self`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from coterie.core import tree
from coterie.core.batch import Data
from coterie.core.errors import CoterieError
from coterie.core.families import check_words
from coterie.core.model import Model
from coterie.core.protections import Protections
from coterie.core.schedules import RateSchedule
from coterie.core.training import LocalTraining
from coterie.core.tree import Tree
from coterie.core.validation import Explicit

Server = TypeVar("Server")
State = TypeVar("State")
Down = TypeVar("Down")
Up = TypeVar("Up")


class Census(NamedTuple):
    """What clients report when they join."""

    samples: Tensor  # (m,) training samples
    class_counts: Tensor  # (m, K)


@dataclass(frozen=True)
class Method(Explicit, ABC, Generic[Server, State, Down, Up]):
    train: LocalTraining = field(default=LocalTraining(), metadata={"help": "local training"})

    title: ClassVar[str]  # the paper's spelling
    formula: ClassVar[str] = ""  # what defines the method, in the notation of docs/methods.md
    # What a run reports, and at which point it is measured: `pre` (the personal model as downloaded), `post`
    # (after local training), `finished` (after client_finish), `global` (the server's model).
    results: ClassVar[dict[str, str]]
    # For the catalogue, in the words of core/families.py: what the method does, and the situations it is designed for.
    family: ClassVar[str] = ""
    suits: ClassVar[tuple[str, ...]] = ()
    personal_is_global: ClassVar[bool] = False  # True: before local training every client has the server's model
    stackable: ClassVar[bool] = True  # False: branches on tensor values, so clients must be looped
    exact: ClassVar[bool] = False  # True: messages must arrive bit for bit, so they cannot be rounded

    protections: ClassVar[Protections] = {}  # see core/protections.py
    # True: this part of a network is trained on its own, or is what a client keeps or sends, so a network in which it
    # has nothing to train (frozen, or without parameters) is refused.
    needs_head: ClassVar[bool] = False
    needs_encoder: ClassVar[bool] = False
    needs_norm: ClassVar[bool] = False  # True: for networks with normalization layers that are trained
    needs_classes: ClassVar[bool] = False  # True: for classification only, one class per sample
    needs_sgd: ClassVar[str] = ""  # why local training must be by sgd; empty: any optimizer will do

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        train = args[0] if args else settings.get("train", cls.train)
        if not isinstance(train, LocalTraining):
            raise CoterieError(
                f"train must be a coterie.LocalTraining, got {type(train).__name__}; an optimizer is set by its name: "
                'coterie.LocalTraining(optimizer="adamw", lr=0.001)'
            )
        return super().__new__(cls, *args, **settings)

    def __init_subclass__(cls, **options: Any) -> None:
        """A subclass without its own `title` or `results` uses its class name in both."""
        super().__init_subclass__(**options)
        check_words(cls.__name__, cls.family, cls.suits)
        inherited: str | None = getattr(super(cls, cls), "title", None)
        if inherited is None:
            return
        if "title" not in vars(cls):
            cls.title = cls.__name__
        if "results" not in vars(cls):
            cls.results = {name.replace(inherited, cls.title, 1): point for name, point in cls.results.items()}

    def refuses(self, rates: RateSchedule) -> str:
        """Why the method cannot be used with this learning-rate schedule; empty: it can."""
        return ""

    def rehearsed(self) -> Method[Server, State, Down, Up]:
        """The method for a rehearsal, where one process is server and client at once."""
        return self

    @abstractmethod
    def server_init(self, model: Model, census: Census) -> Server: ...

    def server_welcome(self, server: Server) -> Tree:
        """What a client receives once, when it joins."""
        return {}

    @abstractmethod
    def server_send(self, server: Server, client: Tensor) -> Down:
        """The message to a client. client: () its id."""

    def server_greet(self, server: Server) -> Down | None:
        """The message to a client that was not in training; None if there is none.

        The default is correct for methods that send the same message to all clients.
        """
        return self.server_send(server, torch.tensor(0))

    @abstractmethod
    def client_init(self, model: Model, data: Data, welcome: Tree) -> State: ...

    @abstractmethod
    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]: ...

    @abstractmethod
    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        """The next server state. clients: (S,) ids. ups: one Up with a leading axis of S."""

    def server_train(self, model: Model, server: Server, key: Tensor) -> Server:
        """Training on the server, after `server_receive` in every round. key: () random key of this round.

        What it trains on is in the server's state, where `server_receive` puts it.
        """
        return server

    @property
    def trains_on_server(self) -> bool:
        """Whether the server trains."""
        return type(self).server_train is not Method.server_train

    def client_finish(self, model: Model, state: State, down: Down, data: Data) -> State:
        """The final step after the last round, such as fine-tuning or building a datastore."""
        return state

    @property
    def finishes(self) -> bool:
        """Whether the method has a final step."""
        return type(self).client_finish is not Method.client_finish

    @abstractmethod
    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        """(B, K) logits of the personal model."""

    def server_predict(self, model: Model, server: Server, x: Tensor) -> Tensor | None:
        """(B, K) logits of the global model; None if there is none."""
        return None

    def server_report(self, server: Server) -> Tree:
        """Tensors to record every round, in addition to accuracies."""
        return {}

    # For pictures, of methods that change what clients train on.

    def training_classes(self, class_counts: Tensor) -> Tensor | None:
        """(m, K) samples of each class that clients train on, from their own; None if these are the same."""
        return None

    def augmentations(self, x: Tensor, key: Tensor) -> dict[str, Tensor]:
        """Name -> images x (B, C, H, W) as the method can vary them; empty if it does not."""
        return {}


AnyMethod = Method[Any, Any, Any, Any]


def messages(method: AnyMethod, server: Any, clients: Tensor) -> Any:
    """One Down with a leading axis: row s is for clients[s]. Tensors that are equal for all clients are not copied."""
    if method.stackable:
        return torch.func.vmap(lambda client: method.server_send(server, client))(clients)
    return tree.stack([method.server_send(server, client) for client in clients])
