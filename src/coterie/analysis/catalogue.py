"""The catalogue of methods, from their code: family, messages, state, traffic, papers, and what they suit."""

from __future__ import annotations

import typing
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from coterie.analysis.citations import Description, described
from coterie.analysis.contents import contents
from coterie.core import tree
from coterie.core.data import FederatedData, Split
from coterie.core.errors import CoterieError
from coterie.core.families import SITUATIONS
from coterie.core.method import AnyMethod
from coterie.core.tasks import TASKS
from coterie.execution import Looped, Turn
from coterie.execution.requests import send
from coterie.execution.scoring import has_global
from coterie.methods import METHODS, VARIANTS
from coterie.models import make_network
from coterie.privacy.examine import examine
from coterie.privacy.refusals import verdict

CLIENTS = 20
LITTLE = 0.5  # share of FedAvg's traffic below which a method needs little bandwidth
PRIVATE = ("dp-sample", "dp-client", "encrypt")


class Traffic(NamedTuple):
    """What one client exchanges in one round, and whether the server has a model."""

    down: tuple[str, ...]  # fields that are sent to a client
    up: tuple[str, ...]
    has_global: bool
    bytes_down: int
    bytes_up: int
    model: int  # bytes of the whole model


@dataclass(frozen=True)
class MethodEntry:
    """A method with its default settings. What has to be tried out is found when it is first asked for."""

    name: str
    method: AnyMethod

    @property
    def family(self) -> str:
        return self.method.family

    @cached_property
    def description(self) -> Description:
        return described(type(self.method))

    @property
    def year(self) -> int | None:
        return self.description.citation.year if self.description.citation else None

    @property
    def stays(self) -> tuple[str, ...]:
        """Fields of a client's state, without momentum."""
        return tuple(n for n in message(self.method, "client_init")._fields if "momentum" not in n)

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(name for name, task in TASKS.items() if task.one_class or not self.method.needs_classes)

    @property
    def variants(self) -> dict[str, str]:
        """Other names of the command line -> title."""
        return {variant: title for variant, (base, _, title) in VARIANTS.items() if base == self.name}

    @cached_property
    def private(self) -> tuple[str, ...]:
        """The protections that the method allows."""
        kinds = [kind for kind in PRIVATE if kind != "encrypt" and verdict(kind, self.method) is None]
        try:
            examine(self.method)
        except CoterieError:
            return tuple(kinds)
        return (*kinds, "encrypt")

    @cached_property
    def sends(self) -> tuple[str, ...]:
        return contents(self.method)

    @cached_property
    def traffic(self) -> Traffic:
        return measured(self.method)

    @property
    def share(self) -> float:
        """Bytes of a round, as a share of FedAvg's."""
        return (self.traffic.bytes_down + self.traffic.bytes_up) / (2 * self.traffic.model)

    def meets(self, situation: str) -> bool:
        """Whether the method suits a situation, by its own declaration or by what it does."""
        return situation in self.method.suits or self.derives(situation)

    def derives(self, situation: str) -> bool:
        match situation:
            case "many clients":  # where there is a final step, the state is what it makes
                stateless = self.method.personal_is_global and (not self.stays or self.method.finishes)
                return stateless and "few clients" not in self.method.suits
            case "new clients" | "global model":
                return self.traffic.has_global
            case "little bandwidth":
                return 0 < self.share < LITTLE
            case "privacy":
                return set(self.private) == set(PRIVATE)
            case "no classes needed":
                return not self.method.needs_classes
        return False

    def as_json(self) -> dict[str, Any]:
        citation = self.description.citation
        return {
            "name": self.name,
            "title": self.method.title,
            "family": self.family,
            "about": self.description.about,
            "paper": citation and citation._asdict(),
            "sends": self.sends,
            **self.traffic._asdict(),
            "stays": self.stays,
            "results": dict(self.method.results),
            "tasks": self.tasks,
            "private": self.private,
            "suits": tuple(word for word in SITUATIONS if self.meets(word)),
            "variants": self.variants,
        }


def entries() -> list[MethodEntry]:
    return [MethodEntry(name, kind()) for name, kind in METHODS.items()]


def message(method: AnyMethod, function: str) -> Any:
    """The type that a function of a method returns: `Down` of server_send, `State` of client_init."""
    return typing.get_type_hints(getattr(type(method), function))["return"]


def measured(method: AnyMethod) -> Traffic:
    """The messages of one round, without training."""
    data = sample_data()
    brief = replace(method, train=method.train.but(local_epochs=0))
    backend = Looped(brief, make_network("cnn", data, 0), data, 0, processes=1)
    server = backend.method.server_init(backend.model, backend.census)
    backend.join(backend.method.server_welcome(server))
    everyone = torch.arange(CLIENTS)
    downs = send(backend.method, server, everyone)
    ups = backend.train(everyone, downs, Turn(0)).ups
    return Traffic(
        filled(downs),
        filled(ups),
        has_global(method, backend.model, server, data),
        tree.size(downs) // CLIENTS,
        tree.size(ups) // CLIENTS,
        tree.size(backend.model.start),
    )


def filled(messages: Any) -> tuple[str, ...]:
    """The fields that hold something."""
    return tuple(name for name in type(messages)._fields if tree.leaves(getattr(messages, name)))


def sample_data() -> FederatedData:
    """Images of the paper's size; only shapes matter."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (CLIENTS * 10, 1, 28, 28), generator=draw, dtype=torch.uint8)
    split = Split(x, torch.arange(10).repeat(CLIENTS), (10,) * CLIENTS)
    return FederatedData("sample", 10, split, split)
