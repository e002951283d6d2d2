"""Networks by name. Each is a function of the shape of one sample and the number of classes."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable

import torch
from torch import nn

from coterie.core.errors import CoterieError, unknown
from coterie.models.cnn import akd_cnn, cnn, conv4, convnet
from coterie.models.network import Network, Shape
from coterie.models.resnet import resnet18
from coterie.models.tabular import linear, mlp

__all__ = ["MODELS", "Network", "build"]

MODELS: dict[str, Callable[..., Network]] = {
    "akd-cnn": akd_cnn,
    "cnn": cnn,
    "conv4": conv4,
    "convnet": convnet,
    "linear": linear,
    "mlp": mlp,
    "resnet18": resnet18,
}


def build(name: str, shape: Shape, classes: int, seed: int, **options: object) -> nn.Module:
    """The network of this name, on the CPU, with weights that depend on the seed only.

    The name is one of MODELS or an import path package.module:Class. Such a class is called with
    (shape, classes) where it wants two arguments, else with none. torch's own random state is left as it was.
    """
    if classes < 1:
        raise CoterieError(f"a model needs at least 1 class, not {classes}")
    maker, arguments = _maker(name, tuple(shape), classes)
    try:
        inspect.signature(maker).bind(*arguments, **options)
    except TypeError as error:
        raise CoterieError(f"model '{name}': {error}") from None
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the GPUs as well
        network = maker(*arguments, **options)
    if not isinstance(network, nn.Module):
        raise CoterieError(f"model '{name}' makes a {type(network).__name__}, not a torch.nn.Module")
    return network


def _maker(name: str, shape: Shape, classes: int) -> tuple[Callable[..., object], tuple[object, ...]]:
    """What makes the network, and with which arguments."""
    if name in MODELS:
        return MODELS[name], (shape, classes)
    if ":" not in name:
        raise unknown("model", name, MODELS)
    maker = _imported(name)
    return maker, (shape, classes) if _wants_shape(maker) else ()


def _imported(path: str) -> Callable[..., object]:
    module, _, attribute = path.partition(":")
    try:
        found: object = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a module of the user may fail in any way
        raise CoterieError(f"cannot import model '{path}': {error}") from error
    if not callable(found):
        raise CoterieError(f"model '{path}' is a {type(found).__name__}, not a class or function")
    return found


def _wants_shape(maker: Callable[..., object]) -> bool:
    """Whether it has two arguments without default, or says that they are the shape and the classes."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    places = [p for p in inspect.signature(maker).parameters.values() if p.kind in kinds]
    required = [p for p in places if p.default is inspect.Parameter.empty]
    return len(required) == 2 or [p.name for p in places[:2]] == ["shape", "classes"]
