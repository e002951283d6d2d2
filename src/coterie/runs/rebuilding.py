"""Build a run's method and network from its configuration. Code outside Coterie needs the user's consent."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from coterie.core.batchnorm import AVERAGED, keep_norms
from coterie.core.errors import CoterieError
from coterie.core.importing import is_code, trusted, untrusted
from coterie.core.method import AnyMethod
from coterie.core.model import FROZEN, Model
from coterie.core.task import Task
from coterie.models import build_model
from coterie.runs.config import made_method, made_task

if TYPE_CHECKING:
    from coterie.runs.stored_run import StoredRun


def rebuilt_method(run: StoredRun) -> AnyMethod:
    section, own = run.section("method"), run.own_method
    if own is None and is_code(section["class"]):
        trust(run, "method", section["class"])
        own = section["class"]
    with run.files.parsing("config.json"):
        method = made_method(section, own)
    policy = run.settings.batchnorm
    return method if policy == AVERAGED else keep_norms(method, policy, run.model)


def rebuilt_task(run: StoredRun) -> Task:
    section, own = run.section("task"), run.own_task
    if own is None and is_code(str(section.get("class", ""))):
        trust(run, "task", section["class"])
        own = section["class"]
    with run.files.parsing("config.json"):
        return made_task(section, run.classes, own)


def rebuilt_model(run: StoredRun) -> Model:
    """The network with the weights that all clients started from."""
    start = run.model_files.tensors("start.safetensors")
    frozen = run.model_files.tensors("frozen.safetensors") if "frozen.safetensors" in run.model_files.sums else {}
    initial = start | {f"{FROZEN}{name}": t for name, t in frozen.items()}
    dtype = next((t.dtype for t in start.values() if t.is_floating_point()), torch.float32)
    network, section = network_of(run), run.section("network")
    options = section.get("args") if isinstance(network, str) else None
    sample, given = (run.shape, run.dtype, run.task, run.transform), (section["head"], run.settings.seed, options)
    model = build_model(network, *sample, *given, run.label_shape, train_only=section.get("train_only"))
    model = model.to("cpu", dtype)
    if {name: t.shape for name, t in model.initial.items()} != {name: t.shape for name, t in initial.items()}:
        raise CoterieError(
            f"{run.folder}: the network has other weights than the one that was trained, or freezes others "
            "(requires_grad=False); was its code changed?"
        )
    return model.begin_from(initial)


def network_of(run: StoredRun) -> str | nn.Module:
    """The network that the user gave, or the name in config.json."""
    if run.own_model is not None:
        return run.own_model
    name: str | None = run.section("network")["name"]
    if name is None:
        raise CoterieError(
            f"{run.folder}: the network was a Python object, so it cannot be rebuilt by name. Pass it as "
            "coterie.load_run(path, model=network), or --model package.module:Class. Runs that were started with such "
            "a name can be loaded without it"
        )
    if is_code(name):
        trust(run, "model", name)
    return name


def trust(run: StoredRun, what: str, name: str) -> None:
    """Import code that config.json names, if the user allows it."""
    if not run.trust_code:
        raise untrusted(run.folder, f"--{what}", name)
    trusted(what, name, run.config.get("command"))
