"""The three arguments of a run: a method, data, a model. Swapped arguments are refused with the right order."""

from __future__ import annotations

from typing import Any

from torch import nn

from coterie.core.data import FederatedData
from coterie.core.errors import CoterieError
from coterie.core.method import Method
from coterie.core.model import Model

ORDER = "the order is (method, data, model), such as coterie.run('fedavg', data, 'cnn')"


def check_arguments(method: Any, data: Any, model: Any) -> None:
    """Refuse what is not a method, data or a model in its place."""
    for name, value, kinds in (
        ("method", method, (str, Method)),
        ("data", data, (FederatedData, type(None))),
        ("model", model, (str, nn.Module, Model, type(None))),
    ):
        if isinstance(value, type):
            raise CoterieError(f"{name} is the class {value.__name__}: pass an object, such as {value.__name__}(...)")
        if not isinstance(value, kinds):
            hint = f"load data with coterie.load_clients(...); {ORDER}" if name == "data" else ORDER
            raise CoterieError(f"{name} is {word(value)}; {hint if swapped(value) is None else ORDER}")


def swapped(value: Any) -> str | None:
    """Which argument this value would be, or None."""
    kinds = {"method": Method, "model": nn.Module | Model, "data": FederatedData}
    return next((name for name, kind in kinds.items() if isinstance(value, kind)), None)


def word(value: Any) -> str:
    meant = {"method": "a method", "model": "a model", "data": "data of clients"}
    found = swapped(value)
    return meant[found] if found else f"{value!r:.40} ({type(value).__name__})"
