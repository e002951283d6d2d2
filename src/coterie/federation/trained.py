"""The outcome of training: history, server state and client states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from coterie.core import tree
from coterie.core.data import FederatedData
from coterie.core.method import AnyMethod
from coterie.core.model import Model
from coterie.execution import ClientMemory
from coterie.execution.requests import send
from coterie.federation.finals import FinalMetrics
from coterie.federation.history import Ended, History, Outcome


@dataclass(frozen=True, repr=False)
class TrainedFederation:
    """A federation after its last round."""

    method: AnyMethod
    model: Model
    data: FederatedData | None  # None: data and models are on the clients' machines
    server: Any
    states: ClientMemory  # of all clients
    history: History
    privacy: Mapping[str, Any] | None = field(default=None, kw_only=True)  # ε, δ and what they protect; None: no noise
    finals: FinalMetrics | None = field(
        default=None, kw_only=True
    )  # None: clients are devices, or have no test samples

    @property
    def client_ids(self) -> Sequence[int]:
        """Ids of the clients whose models are here."""
        return range(len(self.states) if self.data is not None else 0)

    @property
    def ended(self) -> Ended | None:
        """Why the run ended, and after which round."""
        return self.history.ended

    @property
    def partition(self) -> Any:
        """The partition of the samples, if Coterie made it."""
        return self.data and self.data.partition

    def outcomes(self) -> list[Outcome]:
        """The results that the method reports."""
        found = [self.history.outcome(name, point) for name, point in self.method.results.items()]
        return [outcome for outcome in found if outcome is not None]

    def down(self, client: int) -> Any:
        """What the server would send to this client now."""
        return tree.pick(send(self.method, self.server, torch.tensor([client])), 0)

    def personal_weights(self, client: int) -> tree.Tree:
        """All tensors of the personal model, by name."""
        return tree.flatten({"state": self.states[client], "down": self.down(client)})
