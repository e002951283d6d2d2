"""Choose where clients run: looped, stacked, on streams or on a Ray cluster, on a CPU or a GPU."""

from __future__ import annotations

import logging
import os
import warnings
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import nn

from coterie.core import tree
from coterie.core.data import FederatedData
from coterie.core.errors import CoterieError, unknown
from coterie.core.method import AnyMethod
from coterie.core.model import Model
from coterie.core.rehearsal import vmap_problem
from coterie.core.validation import check_fields
from coterie.execution.backend import LocalBackend, rehearsal_samples, set_precision
from coterie.execution.looped import Looped
from coterie.execution.memory import check_folder
from coterie.execution.ray import Ray
from coterie.execution.stacked import Stacked
from coterie.execution.streams import Streams
from coterie.gpu.fusion import FusedConv, fuse

log = logging.getLogger("coterie")
SMALL = 200_000  # parameters up to which stacking is faster on a CPU
FEW = 8  # clients below which it is not
BACKENDS = ("auto", "looped", "stacked", "streams", "ray")
CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


@dataclass(frozen=True)
class Execution:
    """Where and how fast clients run. It affects results only by precision and rounding."""

    backend: str = field(default="auto", metadata={"help": "where clients run: looped, stacked, streams, ray or auto"})
    device: str = field(default="auto", metadata={"help": "cpu, cuda, cuda:1, ... or auto"})
    deterministic: bool = field(
        default=False, metadata={"help": "bitwise reproducible results on a GPU, slower; on a CPU they always are"}
    )
    precision: str = field(
        default="fp32",
        metadata={"help": "precision of matrix products: fp32, or tf32 or bf16, faster and less precise"},
    )
    processes: int | None = field(
        default=None, metadata={"help": "processes of looped clients (default: one per core)", "low": 1}
    )
    cohort: int | None = field(
        default=None, metadata={"help": "clients stacked at a time (default: as many as fit)", "low": 1}
    )
    branches: int | None = field(
        default=None, metadata={"help": "clients side by side on streams (default: 5)", "low": 1}
    )
    state_dir: str | None = field(
        default=None, metadata={"help": "folder for client states, to keep them out of memory"}
    )
    ray_address: str | None = field(
        default=None, metadata={"help": "HOST:PORT of a Ray cluster, or auto (default: start one on this machine)"}
    )
    ray_workers: int | None = field(
        default=None, metadata={"help": "Ray workers (default: one per GPU, or per core)", "low": 1}
    )

    def __post_init__(self) -> None:
        check_fields(type(self), vars(self))
        if self.backend not in BACKENDS:
            raise unknown("backend", self.backend, BACKENDS)


class BackendChoice(NamedTuple):
    backend: str
    why: str  # the reason, where it is not obvious


def place(method: AnyMethod, model: Model, data: FederatedData, seed: int, how: Execution) -> LocalBackend:
    """The requested backend, or the fastest one for backend=auto."""
    model = replace(model, precision=how.precision)
    device = ready(how)
    if how.backend == "ray":
        there = (how.device, how.cohort, how.ray_workers, how.ray_address)
        return Ray(method, model, data, seed, *there, how.state_dir)
    chosen = BackendChoice(how.backend, "") if how.backend != "auto" else fastest(method, model, data, device, how)
    backend: LocalBackend
    match chosen.backend:
        case "looped":
            backend = Looped(method, model, data, seed, device, how.processes, how.state_dir)
        case "streams":
            backend = Streams(method, model, data, seed, device, how.branches, how.cohort, how.state_dir)
        case _:
            backend = Stacked(method, model, data, seed, device, how.cohort, how.state_dir)
    backend.why = chosen.why
    try:
        backend.rehearse()
        if how.backend == "stacked" and (problem := vmap_problem(method, model, *rehearsal_samples(data))):
            raise CoterieError(f"clients cannot be stacked: {problem}; use backend=looped, streams or auto")
    except BaseException:
        backend.close()
        raise
    return backend


def ready(how: Execution) -> str:
    """Prepare this process and return the device; fail early for what this machine cannot do."""
    if how.state_dir is not None:
        check_folder(how.state_dir)
    if how.deterministic:
        be_deterministic(how)
    device = how.device
    if how.backend == "ray":
        return device  # the workers choose theirs
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError) as error:
        raise CoterieError(f"device '{device}' cannot be used: {str(error).splitlines()[0]}") from None
    set_precision(how.precision, torch.device(device))
    warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")  # by `Model`
    return device


def be_deterministic(how: Execution) -> None:
    """Make torch deterministic in this process: no operation sums in a varying order."""
    if how.backend == "ray":
        raise CoterieError("deterministic=True works with backend=looped, stacked or streams, not with ray")
    if torch.cuda.is_initialized() and CUBLAS not in os.environ:  # type: ignore[no-untyped-call]
        raise CoterieError(
            f"deterministic=True must be set before the GPU is used: start with {CUBLAS}=:4096:8 in the environment"
        )
    os.environ.setdefault(CUBLAS, ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False


def fastest(method: AnyMethod, model: Model, data: FederatedData, device: str, how: Execution) -> BackendChoice:
    """The fastest backend that can compute these clients, by what was measured (docs/performance.md)."""
    if not method.stackable or model.hidden_draws:
        return BackendChoice("looped", "the only way for this method or network")
    on_cpu = device.startswith("cpu")
    if on_cpu and not worth_stacking(model, data, how):
        return BackendChoice("looped", "")
    if not on_cpu and unfused(model):
        return BackendChoice("streams", "stacked convolutions are slower in this network")
    problem = vmap_problem(method, model, *rehearsal_samples(data))
    if problem:
        log.debug("torch cannot stack these clients: %s", problem)
        return BackendChoice("looped" if on_cpu else "streams", f"torch cannot stack them: {problem}")
    convolutional = any(map(is_convolution, model.encoder.modules()))
    network = "network with fused convolutions" if convolutional else "network without convolutions"
    return BackendChoice("stacked", f"fastest for a {'small ' if on_cpu else ''}{network}")


def worth_stacking(model: Model, data: FederatedData, how: Execution) -> bool:
    """On a CPU: small networks without convolutions are 3 to 5 times faster stacked, from a few clients on."""
    small = sum(t.numel() for t in tree.leaves(model.start)) <= SMALL
    dense = not any(map(is_convolution, model.encoder.modules()))
    return small and dense and data.num_clients >= FEW and how.processes is None


def unfused(model: Model) -> bool:
    """Whether convolutions are left that are not fused: stacked, they are grouped convolutions, which are slow."""
    return any(is_convolution(layer) and not isinstance(layer, FusedConv) for layer in fuse(model).encoder.modules())


def is_convolution(layer: nn.Module) -> bool:
    return isinstance(layer, nn.modules.conv._ConvNd)
