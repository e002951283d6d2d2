"""Where clients run: looped, side by side or on a cluster, on a CPU or a GPU."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from coterie.clients import Batched, Looped, Ray, Resident
from coterie.clients.batched import has_dropout
from coterie.clients.states import check_folder
from coterie.core import tree
from coterie.core.errors import CoterieError, unknown
from coterie.core.model import Model, make_model, set_precision
from coterie.core.samples import FederatedData
from coterie.methods import AnyMethod
from coterie.models import build

SMALL = 200_000  # numbers of a network that a CPU computes faster side by side
FEW = 8  # clients that are too few for that
KINDS = ("auto", "looped", "batched", "ray")  # of clients
CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


@dataclass(frozen=True)
class Execution:
    """Where and how fast. But for the precision and the last digits, never what comes out."""

    clients: str = field(default="auto", metadata={"help": "looped, batched, ray, or auto: what is faster here"})
    device: str = field(default="auto", metadata={"help": "cpu, cuda, cuda:1, ... or auto"})
    deterministic: bool = field(
        default=False, metadata={"help": "the same numbers every time on a GPU too; slower. On a CPU they always are"}
    )
    precision: str = field(
        default="fp32", metadata={"help": "of matrix products: fp32; tf32 or bf16 are faster and less precise"}
    )
    processes: int | None = field(default=None, metadata={"help": "processes of looped clients; one for each core"})
    cohort: int | None = field(default=None, metadata={"help": "clients batched at a time; as many as fit"})
    state_dir: str | None = field(
        default=None, metadata={"help": "folder to keep what clients remember in; it needs no memory then"}
    )
    ray_address: str | None = field(
        default=None, metadata={"help": "HOST:PORT of a Ray cluster, or auto; usually one is started on this machine"}
    )
    ray_workers: int | None = field(default=None, metadata={"help": "Ray workers; one for each GPU, or for each core"})

    def __post_init__(self) -> None:
        if self.clients not in KINDS:
            raise unknown("kind of clients", self.clients, KINDS)
        for name in ("processes", "cohort", "ray_workers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise CoterieError(f"{name.replace('_', ' ')} must be at least 1, not {value}")


def make_network(model: str | nn.Module, data: FederatedData, seed: int, head: str | None = None) -> Model:
    network = build(model, data.shape, data.classes, seed) if isinstance(model, str) else model
    return make_model(network, data.shape, data.classes, data.transform, head)


def place(method: AnyMethod, model: Model, data: FederatedData, seed: int, how: Execution) -> Resident:
    """The clients, where they are asked to run or where they run fastest."""
    model = replace(model, precision=how.precision)
    device = ready(how)
    if how.clients == "ray":
        there = (how.device, how.cohort, how.ray_workers, how.ray_address)
        return Ray(method, model, data, seed, *there, how.state_dir)
    where = how.clients if how.clients != "auto" else fastest(method, model, data, device, how)
    if where == "looped":
        return Looped(method, model, data, seed, device, how.processes, how.state_dir)
    return Batched(method, model, data, seed, device, how.cohort, how.state_dir)


def ready(how: Execution) -> str:
    """The device. What this machine cannot do is told now."""
    if how.state_dir is not None:
        check_folder(how.state_dir)
    if how.deterministic:
        be_deterministic(how)
    device = how.device
    if how.clients == "ray":
        return device  # of other machines
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError) as error:
        raise CoterieError(f"device '{device}' cannot be used: {str(error).splitlines()[0]}") from None
    set_precision(how.precision, torch.device(device))
    return device


def be_deterministic(how: Execution) -> None:
    """For all of this process: no operation whose sums come in another order each time."""
    if how.clients == "ray":
        raise CoterieError("deterministic is for clients of this process, not for workers of a Ray cluster")
    if torch.cuda.is_initialized() and CUBLAS not in os.environ:  # type: ignore[no-untyped-call]
        raise CoterieError(f"deterministic must be known before the GPU is used: start with {CUBLAS}=:4096:8 set")
    os.environ.setdefault(CUBLAS, ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False


def fastest(method: AnyMethod, model: Model, data: FederatedData, device: str, how: Execution) -> str:
    """Side by side on a GPU; on a CPU only small networks without convolutions, which are 3 to 5 times as fast so."""
    if not method.batched or has_dropout(model):
        return "looped"
    if not device.startswith("cpu"):
        return "batched"
    convolutions = any(isinstance(m, nn.modules.conv._ConvNd) for m in model.encoder.modules())
    small = sum(t.numel() for t in tree.leaves(model.start)) <= SMALL
    return "batched" if small and not convolutions and data.clients >= FEW and how.processes is None else "looped"
