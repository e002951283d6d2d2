"""A network in which no head was found: a whole, for methods that do not divide networks."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

from coterie.core.errors import CoterieError
from coterie.core.model import Model, Weights
from coterie.core.tree import Tree


@dataclass(frozen=True)
class HeadlessModel(Model):
    """Refuses methods that use features or the head, in a rehearsal."""

    calls: list[None] = field(default_factory=list)  # of the whole network, that are being computed

    @staticmethod
    def of(model: Model) -> HeadlessModel:
        return HeadlessModel(**{f.name: getattr(model, f.name) for f in fields(Model)})

    def __call__(self, weights: Weights, x: Tensor) -> Tensor:
        self.calls.append(None)
        try:
            return super().__call__(weights, x)
        finally:
            self.calls.pop()

    def features(self, encoder: Tree, x: Tensor) -> Tensor:
        self.check()
        return super().features(encoder, x)

    def logits(self, head: Tree, z: Tensor) -> Tensor:
        self.check()
        return super().logits(head, z)

    def maps(self, encoder: Tree, x: Tensor) -> Any:
        raise needs_head("this method", self)

    def check(self) -> None:
        if not self.calls:
            raise needs_head("this method", self)


def needs_head(method: str, model: Model) -> CoterieError:
    return CoterieError(
        f"{method} divides a network into encoder and head, but {model.headless}. Methods that do not, such as fedavg "
        "and ditto, take the network as it is"
    )
