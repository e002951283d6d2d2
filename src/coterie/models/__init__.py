"""Networks by name, each an encoder and a head; a client's model as a plain module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from coterie.core.data import FederatedData, Transform, is_pixels
from coterie.core.errors import CoterieError, unknown
from coterie.core.importing import imported
from coterie.core.model import Model, make_model
from coterie.core.task import Task
from coterie.core.tasks import NextToken
from coterie.core.user_code import failure
from coterie.models.adapters import freeze
from coterie.models.attention import transformer, vit_tiny
from coterie.models.cnn import akd_cnn, akd_cnn_text, cnn, conv4, convnet
from coterie.models.mobilenet import mobilenet
from coterie.models.network import Network, Shape
from coterie.models.resnet import resnet18, resnet18_gn
from coterie.models.series import check_embeddings, check_tokens, cnn1d, lstm
from coterie.models.tabular import linear, mlp
from coterie.models.unet import unet

__all__ = ["MODELS", "Network", "build", "build_model", "make_network"]

MODELS: dict[str, Callable[..., Network]] = {
    "akd-cnn": akd_cnn,
    "akd-cnn-text": akd_cnn_text,
    "cnn": cnn,
    "cnn1d": cnn1d,
    "conv4": conv4,
    "convnet": convnet,
    "linear": linear,
    "lstm": lstm,
    "mlp": mlp,
    "mobilenet": mobilenet,
    "resnet18": resnet18,
    "resnet18-gn": resnet18_gn,
    "transformer": transformer,
    "unet": unet,
    "vit-tiny": vit_tiny,
}
OVER_TOKENS = ("lstm", "transformer")  # have an output for every token for the task next-token, and leave out padding


def make_network(
    model: str | nn.Module,
    data: FederatedData,
    seed: int,
    head: str | None = None,
    model_args: Mapping[str, Any] | None = None,
    train_only: str | None = None,
) -> Model:
    sample = (data.shape, data.train.x.dtype, data.task, data.transform)
    made = build_model(model, *sample, head, seed, model_args, data.label_shape, train_only)
    vocabulary = (model_args or {}).get("vocabulary")
    if isinstance(model, str) and model in MODELS:
        if vocabulary is not None:
            check_tokens(data, vocabulary)
    elif not is_pixels(data.shape, data.train.x.dtype) and not data.train.x.is_floating_point():
        check_embeddings(made, data)
    return made


def build_model(
    network: str | nn.Module,
    shape: Shape,
    sample_type: torch.dtype,
    task: Task | int,
    transform: Transform,
    head: str | None,
    seed: int,
    options: Mapping[str, Any] | None = None,
    label: Shape = (),
    train_only: str | None = None,
) -> Model:
    """Build the model of a federation from a network or its name.

    shape, sample_type: of one raw sample; label: shape of one label. task: an int stands for classification into that
    many classes. options: constructor arguments, for a network given by name. train_only: the parameters that are
    trained, as `except_` of `freeze`; default: those with requires_grad=True.
    """
    if isinstance(network, str):
        outputs = task if isinstance(task, int) else task.width
        per_token = {"vocabulary": outputs, "per_token": True} if isinstance(task, NextToken) else {}
        padding = {} if transform.padding is None else {"padding": transform.padding}
        if network == "cnn1d" and padding:
            raise CoterieError(
                "model 'cnn1d' takes series (C, T), and padded series are (T, F); choose lstm, transformer or a "
                "network of your own"
            )
        usual = {**per_token, **padding} if network in OVER_TOKENS else {}
        shapes = {one.name: one.shape for one in transform.inputs} or transform.input_shape(shape)
        network = build(network, shapes, outputs, seed, **{**usual, **(options or {})})
    elif options:
        raise CoterieError("model_args need a model name; pass them to the constructor of this model instead")
    if train_only is not None:
        network = freeze(network, train_only)
    return make_model(network, shape, task, transform, head, sample_type, label)


def build(name: str, shape: Shape | dict[str, Shape], classes: int, seed: int, **options: object) -> nn.Module:
    """Build a network by name on the CPU, with weights that depend only on the seed.

    shape: of a sample; several inputs: of each, by name.
    name: one of MODELS or an import path package.module:Class. The class is called with (shape, classes) if it takes
    two arguments, else with none. torch's random state does not change.
    """
    if classes < 1:
        raise CoterieError(f"a model needs at least 1 class, got {classes}")
    maker, arguments = _maker(name, shape if isinstance(shape, dict) else tuple(shape), classes)
    try:
        inspect.signature(maker).bind(*arguments, **options)
    except TypeError as error:
        takes = ", ".join(list(inspect.signature(maker).parameters)[len(arguments) :]) or "no others"
        raise CoterieError(f"model '{name}': {error}; --model-args name=value sets arguments ({takes})") from None
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the GPUs as well
        try:
            network = maker(*arguments, **options)
        except CoterieError:
            raise
        except Exception as error:
            if name in MODELS:
                raise
            raise failure(f"model '{name}' cannot be built", error) from error
    if not isinstance(network, nn.Module):
        raise CoterieError(f"model '{name}' returns a {type(network).__name__}, not a torch.nn.Module")
    return network


def _maker(
    name: str, shape: Shape | dict[str, Shape], classes: int
) -> tuple[Callable[..., object], tuple[object, ...]]:
    """The constructor of the network, and its positional arguments."""
    if name in MODELS:
        if isinstance(shape, dict):
            raise CoterieError(
                f"model '{name}' takes one input, the samples have {', '.join(shape)}; pass a network of your own, "
                "whose forward takes these names or one dictionary"
            )
        return MODELS[name], (shape, classes)
    if ":" not in name:
        raise unknown("model", name, MODELS)
    maker = _imported(name)
    return maker, (shape, classes) if _wants_shape(maker) else ()


def _imported(path: str) -> Callable[..., object]:
    found: object = imported("model", path)
    if isinstance(found, nn.Module) or not callable(found):
        raise CoterieError(f"model '{path}' is a {type(found).__name__}, not a class or function")
    return found


def _wants_shape(maker: Callable[..., object]) -> bool:
    """Whether it has two required arguments, or its first two are named shape and classes."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    places = [p for p in inspect.signature(maker).parameters.values() if p.kind in kinds]
    required = [p for p in places if p.default is inspect.Parameter.empty]
    return len(required) == 2 or [p.name for p in places[:2]] == ["shape", "classes"]
