"""A method that wraps another one and delegates to it; subclasses override what they change.

Protections (noise, clipping, encryption) are such wrappers, so they work with every method and no method knows them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from torch import Tensor

from coterie.core.batch import Data
from coterie.core.method import Census, Method
from coterie.core.model import Model
from coterie.core.tree import Tree


@dataclass(frozen=True)
class Around(Method[Any, Any, Any, Any]):
    lasts: ClassVar[bool] = False  # True: models after the run need it, not only the rounds

    inner: Method[Any, Any, Any, Any] = field(kw_only=True)

    def __post_init__(self) -> None:
        for name in ("train", "title", "results", "personal_is_global", "stackable", "exact"):
            object.__setattr__(self, name, getattr(self.inner, name))

    def rehearsed(self) -> Method[Any, Any, Any, Any]:
        return replace(self, inner=self.inner.rehearsed())

    def inside(self, server: Any) -> Any:
        """The inner method's server state, without what this wrapper added."""
        return server

    def opened(self, down: Any) -> Any:
        """The inner method's Down, without what this wrapper added."""
        return down

    def server_init(self, model: Model, census: Census) -> Any:
        return self.inner.server_init(model, census)

    def server_welcome(self, server: Any) -> Tree:
        return self.inner.server_welcome(server)

    def server_send(self, server: Any, client: Tensor) -> Any:
        return self.inner.server_send(server, client)

    def server_greet(self, server: Any) -> Any:
        return self.inner.server_greet(server)

    def client_init(self, model: Model, data: Data, welcome: Tree) -> Any:
        return self.inner.client_init(model, data, welcome)

    def client_train(self, model: Model, state: Any, down: Any, data: Data) -> tuple[Any, Any]:
        return self.inner.client_train(model, state, down, data)

    def server_receive(self, server: Any, clients: Tensor, ups: Any) -> Any:
        return self.inner.server_receive(server, clients, ups)

    def server_train(self, model: Model, server: Any, key: Tensor) -> Any:
        return self.inner.server_train(model, server, key)

    @property
    def trains_on_server(self) -> bool:
        return self.inner.trains_on_server

    def client_finish(self, model: Model, state: Any, down: Any, data: Data) -> Any:
        return self.inner.client_finish(model, state, down, data)

    @property
    def finishes(self) -> bool:
        return self.inner.finishes

    def client_predict(self, model: Model, state: Any, down: Any, x: Tensor) -> Tensor:
        return self.inner.client_predict(model, state, down, x)

    def server_predict(self, model: Model, server: Any, x: Tensor) -> Tensor | None:
        return self.inner.server_predict(model, server, x)

    def server_report(self, server: Any) -> Tree:
        return self.inner.server_report(server)


def innermost(method: Method[Any, Any, Any, Any]) -> Method[Any, Any, Any, Any]:
    return innermost(method.inner) if isinstance(method, Around) else method


def lasting(method: Method[Any, Any, Any, Any]) -> Method[Any, Any, Any, Any]:
    """The method of a finished run, without wrappers that only training needs, such as protections."""
    return lasting(method.inner) if isinstance(method, Around) and not method.lasts else method


def lasting_down(method: Method[Any, Any, Any, Any], down: Any) -> Any:
    """The Down of the lasting method."""
    if isinstance(method, Around) and not method.lasts:
        return lasting_down(method.inner, method.opened(down))
    return down


def lasting_server(method: Method[Any, Any, Any, Any], server: Any) -> Any:
    """The server state of the lasting method."""
    if isinstance(method, Around) and not method.lasts:
        return lasting_server(method.inner, method.inside(server))
    return server
