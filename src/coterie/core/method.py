"""What a method is.

A method is a frozen dataclass of hyper-parameters with pure functions. Those named `server_*` run on the
server, those named `client_*` on ONE client; what crosses between them is `Down` and `Up`, nothing else.
`Server` and `State` are what each side remembers: given in, handed out, never kept on `self`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from coterie.core.local import Data, Sgd
from coterie.core.model import Model
from coterie.core.tree import Tree

Server = TypeVar("Server")
State = TypeVar("State")
Down = TypeVar("Down")
Up = TypeVar("Up")


class Census(NamedTuple):
    """What the clients said when they joined."""

    samples: Tensor  # (m,) training samples
    class_counts: Tensor  # (m, K)


@dataclass(frozen=True)
class Method(ABC, Generic[Server, State, Down, Up]):
    train: Sgd = field(default=Sgd(), metadata={"help": "local training"})

    title: ClassVar[str]  # as the paper spells it
    # What a run reports, and at which point it is measured: `pre` (the personal model as downloaded), `post`
    # (after local training), `finished` (after client_finish), `global` (the server's model).
    results: ClassVar[dict[str, str]]
    personal_is_global: ClassVar[bool] = False  # True: before local training every client has the server's model
    batched: ClassVar[bool] = True  # False: branches on tensor values, so clients must be looped
    exact: ClassVar[bool] = False  # True: what is sent must arrive to the last bit, so it cannot travel rounded

    def rehearsed(self) -> Method[Server, State, Down, Up]:
        """The same for one who is server and client at once, to see what messages look like."""
        return self

    @abstractmethod
    def server_init(self, model: Model, census: Census) -> Server: ...

    def server_welcome(self, server: Server) -> Tree:
        """What a client is told once, when it joins."""
        return {}

    @abstractmethod
    def server_send(self, server: Server, client: Tensor) -> Down:
        """client: () its id."""

    def server_greet(self, server: Server) -> Down | None:
        """What a client that was never in training is sent; None where there is nothing to give.

        As it stands, right for methods that send all clients alike.
        """
        return self.server_send(server, torch.tensor(0))

    @abstractmethod
    def client_init(self, model: Model, data: Data, welcome: Tree) -> State: ...

    @abstractmethod
    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]: ...

    @abstractmethod
    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        """clients: (S,) ids; ups: one Up with a leading axis of S."""

    def client_finish(self, model: Model, state: State, down: Down, data: Data) -> State:
        """Once, after the last round: a fine-tuning, a datastore."""
        return state

    @property
    def finishes(self) -> bool:
        """Whether there is such a last step."""
        return type(self).client_finish is not Method.client_finish

    @abstractmethod
    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        """(B, K) logits of the personal model."""

    def server_predict(self, model: Model, server: Server, x: Tensor) -> Tensor | None:
        """(B, K) logits of the global model; None where there is none."""
        return None

    def server_report(self, server: Server) -> Tree:
        """What is worth recording every round, beside the accuracies."""
        return {}
