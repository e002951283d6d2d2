"""Measures rounds of a workload by phase, alternating with the plain loop."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, fields, replace
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity

from benchmarks.machine import cpu_seconds, forget_peak, peak_memory, synchronize
from benchmarks.neighbour import Neighbour
from benchmarks.roofline import Peaks, Work, floors, step_work
from benchmarks.workloads import SEED, Workload, data, make, network, steps
from coterie.api import Execution, make_network, place
from coterie.core import random
from coterie.core.data import FederatedData
from coterie.core.method import AnyMethod
from coterie.execution import Backend, Turn
from coterie.execution.looped import cores
from coterie.execution.requests import send
from coterie.federation import Round, Settings, rounds
from coterie.federation.timing import PhaseTimer

TIMED = ("train", "receive", "evaluate")  # phases with their own line
SHOWN = 8  # lines of a profile


class SynchronizedTimer(PhaseTimer):
    """Waits for the device before and after a phase, so that phases are timed separately."""

    @contextmanager
    def time(self, phase: str) -> Iterator[None]:
        synchronize()
        with super().time(phase):
            yield
            synchronize()


class Federation:
    """A run that is executed round by round."""

    def __init__(self, clients: Backend, joining: int) -> None:
        self.clients, self.number = clients, 0
        share = joining / clients.data.num_clients
        self.measured = Settings(rounds=10**9, join_ratio=share, seed=SEED)
        self.unmeasured = replace(self.measured, evaluate_every=10**9)
        self.server = clients.method.server_init(clients.model, clients.census)
        clients.join(clients.method.server_welcome(self.server))

    def round(self) -> float:
        """Seconds of a round without evaluation and without synchronization between phases."""
        return self._play(self.unmeasured)[0]

    def round_by_phase(self) -> tuple[float, Round]:
        """Seconds and record of a round with evaluation, in which every phase waits for the device."""
        with patch.object(rounds, "PhaseTimer", SynchronizedTimer):
            return self._play(self.measured)

    def training(self, most: int | None = None) -> float:
        """Seconds of the clients' part of a round. most: only the first participants."""
        m = self.clients.data.num_clients
        joined = random.participants(SEED, self.number, m, self.measured.joining(m))[:most]
        downs = send(self.clients.method, self.server, joined)
        synchronize()
        start = time.perf_counter()
        self.clients.train(joined, downs, Turn(self.number))
        synchronize()
        self.number += 1
        return time.perf_counter() - start

    def _play(self, settings: Settings) -> tuple[float, Round]:
        synchronize()
        start = time.perf_counter()
        self.server, record = rounds.play(self.server, self.clients, settings, self.number)
        synchronize()
        self.number += 1
        return time.perf_counter() - start, record


class Case(NamedTuple):
    """A workload and how it is executed."""

    workload: Workload
    held: FederatedData
    how: Execution
    repeats: int
    profiled: bool = False

    @property
    def on_cpu(self) -> bool:
        return self.how.device == "cpu"

    @property
    def warm(self) -> int:
        """Warm-up rounds. On a GPU, the first records graphs and the second loads kernels."""
        return 1 if self.on_cpu else 3

    def clients(self, method: AnyMethod | None = None) -> Backend:
        """method: default: the workload's."""
        forget_peak()
        model = make_network(network(self.workload, self.held), self.held, SEED)
        return place(method or make(self.workload), model, self.held, SEED, self.how)


class Turns(NamedTuple):
    """Measurements, one value per repeat; each repeat runs the plain loop and our rounds in turn."""

    warming: list[float]  # our warm-up rounds
    ours: list[float]  # seconds of a round without evaluation
    cpu: list[float]  # CPU time of these rounds
    plain: list[dict[str, float]]  # the plain loop's seconds by phase
    watched: list[tuple[float, Round]]

    def phase(self, name: str) -> float:
        return median(record.seconds[name] for _, record in self.watched)

    @property
    def overhead(self) -> float:
        return median(seconds - sum(record.seconds[name] for name in TIMED) for seconds, record in self.watched)


def alternate(federation: Federation, plain: Neighbour, case: Case) -> Turns:
    turns = Turns([], [], [], [], [])
    for _ in range(case.warm):
        turns.warming.append(federation.round_by_phase()[0])
    plain_round(plain)
    for _ in range(case.repeats):
        turns.plain.append(plain_round(plain))
        before = cpu_seconds()
        turns.ours.append(federation.round())
        turns.cpu.append(cpu_seconds() - before)
        turns.watched.append(federation.round_by_phase())
    return turns


def plain_round(plain: Neighbour) -> dict[str, float]:
    plain.ask()
    return plain.answer()


def whole(w: Workload, how: Execution, count: int | None = None) -> dict[str, Any]:
    """A whole run in this process. count: rounds, if not those of the workload."""
    held, count = data(w), count or w.rounds
    settings = Settings(rounds=count, join_ratio=w.joining / w.clients, evaluate_every=w.evaluate_every, seed=SEED)
    case, ends = Case(w, held, how, 1), [time.perf_counter()]
    with closing(case.clients()) as clients:
        ends[0] = time.perf_counter()
        _, history = rounds.federate(clients, settings, lambda record: ends.append(time.perf_counter()))
        memory, way = peak_memory(how.device), title(clients, how)
    each = [late - early for early, late in pairwise(ends)]
    return {
        "about": w.about,
        "workload": asdict(w) | {"data_dir": None},
        "way": way,
        "rounds": count,
        "seconds": ends[-1] - ends[0],
        "first": each[0],  # loads libraries and kernels, and captures graphs
        "round": median(each),
        "accuracy": history.curve("pre")[-1][1],
        "memory_gb": memory,
    }


def measure(w: Workload, ways: list[Execution], repeats: int, peaks: Peaks, profiled: bool) -> dict[str, Any]:
    """All measurements of a workload on this machine."""
    held = data(w)
    work = one_step(w, held)
    with Neighbour("plain", w.written(), ways[0].device) as plain:
        measured = dict(measure_way(Case(w, held, how, repeats, profiled), plain) for how in ways)
    return {
        "about": w.about,
        "workload": asdict(w) | {"data_dir": None},
        "peaks": peaks,
        "step": work._asdict(),
        "floor_ms": {precision: 1e3 * w.joining * floor for precision, floor in floors(work, peaks).items()},
        "ways": measured,
    }


def one_step(w: Workload, held: FederatedData) -> Work:
    """The work of one client in one step with a full batch."""
    x, y = held.train.client(0)
    train = make(w).train
    batch = slice(0, train.batch_size)
    ready = x[batch].float() / 255 if x.ndim == 4 else x[batch]
    return step_work(network(w, held), ready, y[batch], train.momentum > 0)


def measure_way(case: Case, plain: Neighbour) -> tuple[str, dict[str, Any]]:
    """Title and measurements of a case."""
    title, turns, others = play(case, plain)
    method, own, joining = make(case.workload), steps(case.workload, case.held), case.workload.joining
    idle, bare = without_steps(method), without_any_steps(method)
    part = {variant: typical_training(case, variant) for variant in {idle, bare}}
    taken = median(sum(own[i] for i in record.participants.tolist()) for _, record in turns.watched) / joining
    return title, {
        "seconds": turns.ours,
        "plain_seconds": [p["round"] for p in turns.plain],
        "cpu_seconds": turns.cpu,
        "plain_cpu_seconds": [p["cpu"] for p in turns.plain],
        "times_as_fast": median(p["round"] / s for p, s in zip(turns.plain, turns.ours, strict=True)),
        "warming": turns.warming,
        "with_evaluation": median(seconds for seconds, _ in turns.watched),
        "parts": {
            "statistics": part[bare],
            "training": turns.phase("train") - part[bare],
            "aggregation": turns.phase("receive"),
            "evaluation": turns.phase("evaluate"),
            "overhead": turns.overhead,
        },
        "steps": taken,  # of a participant in a round
        "step_ms": 1e3 * (turns.phase("train") - part[idle]) / taken,
        "plain_step_ms": 1e3 * median(p["steps"] for p in turns.plain) / taken,
        **others,
    }


def play(case: Case, plain: Neighbour) -> tuple[str, Turns, dict[str, Any]]:
    """Title, rounds, memory and profile of a case. Frees the clients' memory afterwards."""
    with closing(case.clients()) as clients:
        federation = Federation(clients, case.workload.joining)
        turns = alternate(federation, plain, case)
        others = {"memory_gb": peak_memory(case.how.device), "wasted": getattr(clients, "waste", None)}
        if case.profiled and (not case.on_cpu or case.how.processes == 1):  # others cannot be profiled
            others["profile"] = profile(federation, case.on_cpu)
        return title(clients, case.how), turns, others


def title(clients: Backend, how: Execution) -> str:
    kind = type(clients).__name__.lower()
    if how.device != "cpu":
        return f"{kind}, {how.precision}"
    if kind != "looped":
        return kind
    count = min(how.processes or cores(), clients.data.num_clients)
    return f"{kind}, {count} process{'es' if count > 1 else ''}"


def profile(federation: Federation, on_cpu: bool) -> dict[str, float]:
    """Shares of the clients' time by operation, or by kernel on a GPU, in descending order."""
    activity = ProfilerActivity.CPU if on_cpu else ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[activity]) as seen:
        federation.training(2 if on_cpu else None)  # looped clients are similar: two are enough
    times: Counter[str] = Counter()
    for event in seen.key_averages():
        name = re.split(r"[<(]", event.key.removeprefix("void "))[0]
        name = "matrix products" if re.search("gemm|nvjet|cutlass", name) else name  # kernels with many names
        times[name] += event.self_cpu_time_total if on_cpu else event.self_device_time_total
    whole = sum(times.values()) or 1
    return {name: time / whole for name, time in times.most_common(SHOWN)}


def without_steps(method: AnyMethod) -> AnyMethod:
    """The method without SGD steps, except FedPAC's steps of the head."""
    return replace(method, train=method.train.but(local_epochs=0))


def without_any_steps(method: AnyMethod) -> AnyMethod:
    """The method without any SGD steps: statistics and rebalanced sets remain."""
    own: dict[str, Any] = {"head_epochs": 0} if "head_epochs" in {f.name for f in fields(method)} else {}
    return replace(without_steps(method), **own)


def typical_training(case: Case, method: AnyMethod) -> float:
    with closing(case.clients(method)) as clients:
        federation = Federation(clients, case.workload.joining)
        for _ in range(case.warm):
            federation.training()
        return median(federation.training() for _ in range(case.repeats))
