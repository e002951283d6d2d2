"""What a run leaves: the history, the server's state, and a model for every client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from coterie.clients import States
from coterie.clients.base import AnyMethod, send
from coterie.core import tree
from coterie.core.errors import CoterieError
from coterie.core.model import Model
from coterie.core.samples import FederatedData
from coterie.federation.history import History, Outcome


@dataclass(frozen=True)
class Result:
    method: AnyMethod
    model: Model
    data: FederatedData | None  # None: it is with the clients, and so are their models
    server: Any
    states: States  # of all clients
    history: History
    privacy: Mapping[str, Any] | None = field(default=None, kw_only=True)  # ε, δ, and of what; None: no noise

    @property
    def clients(self) -> Sequence[int]:
        """Those whose models are here."""
        return range(len(self.states) if self.data is not None else 0)

    @property
    def partition(self) -> Any:
        """Which samples each client holds, where that was our doing."""
        return self.data and self.data.partition

    def outcomes(self) -> list[Outcome]:
        """What this method reports."""
        found = [self.history.outcome(name, point) for name, point in self.method.results.items()]
        return [outcome for outcome in found if outcome is not None]

    def down(self, client: int) -> Any:
        """What the server would send this client now."""
        return tree.pick(send(self.method, self.server, torch.tensor([client])), 0)

    def personal_model(self, client: int) -> PersonalModel:
        """A module from raw samples to logits."""
        if self.data is None:
            raise CoterieError("the personal models of this federation are on the devices of its clients")
        if client not in self.clients:
            raise CoterieError(f"there is no client {client}; clients are 0 to {len(self.states) - 1}")
        return PersonalModel(self.method, self.model, self.states[client], self.down(client))

    def personal_weights(self, client: int) -> tree.Tree:
        """All that the personal model is made of, by name."""
        return tree.flatten({"state": self.states[client], "down": self.down(client)})


class PersonalModel(nn.Module):
    """One client's model, for use: raw samples (uint8 images, or features) in, logits out."""

    def __init__(self, method: AnyMethod, model: Model, state: Any, down: Any) -> None:
        super().__init__()
        self.method, self.model, self.state, self.down = method, model, state, down

    def forward(self, x: Tensor) -> Tensor:
        return self.method.client_predict(self.model, self.state, self.down, x)
