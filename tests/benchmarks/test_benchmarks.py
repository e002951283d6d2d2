"""The benchmark measures what it says: its counts against formulas, its loop against hand-written sums."""

from __future__ import annotations

import json
import os
import time
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import ours, performance, tables
from benchmarks.__main__ import main
from benchmarks.machine import cpu_seconds, forget_peak, highest
from benchmarks.plain import Loop, batches, class_means
from benchmarks.plot import plot
from benchmarks.roofline import Work, floors, step_work
from benchmarks.workloads import (
    WORKLOADS,
    Workload,
    data,
    is_tokens,
    make,
    network,
    participants,
    passes,
    steps,
    wide_cnn,
)
from coterie.api import Execution
from coterie.core.training import LocalTraining
from coterie.execution import Looped
from coterie.federation import Settings
from coterie.models import build
from tests import toy

QUICK = {name: w.quick() for name, w in WORKLOADS.items()}


def small(name: str) -> Workload:
    """The workload with a linear network, or its own where samples are tokens."""
    w = QUICK[name]
    return w if is_tokens(w) else replace(w, network="linear")


# The command.


def test_one_command_measures_prints_and_keeps_what_is_in_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "speed.json"
    out.write_text('{"workloads": {"earlier": {}}, "sweeps": {}}', encoding="utf-8")
    main(f"--quick --only fmnist-20 --rounds 1 --processes 1 --device cpu --commit abc --out {out}".split())
    printed = capsys.readouterr().out
    found = json.loads(out.read_text(encoding="utf-8"))["workloads"]
    assert list(found) == ["earlier", "fmnist-20"]
    entry = found["fmnist-20"]
    assert entry["commit"] == "abc"
    way = entry["ways"]["looped, 1 process"]
    assert sum(way["parts"].values()) == pytest.approx(way["with_evaluation"])  # one repeat: medians are the values
    assert way["times_as_fast"] == pytest.approx(way["plain_seconds"][0] / way["seconds"][0])
    assert way["steps"] == 1  # 40 samples, batch 50
    assert all(way["parts"][name] > 0 for name in ("statistics", "training", "aggregation", "evaluation", "overhead"))
    assert entry["floor_ms"]["fp32"] == pytest.approx(
        4e3 * max(entry["step"]["operations"] / entry["peaks"]["fp32"], entry["step"]["bytes"] / bandwidth(entry))
    )
    assert "aggregation and QP" in printed
    assert f"**{way['times_as_fast']:.1f}×**" in printed


def bandwidth(entry: dict[str, Any]) -> float:
    return float(entry["peaks"]["bandwidth"])


class SameProcess:
    """The plain loop without a process of its own."""

    def __init__(self, module: str, workload: str, device: str) -> None:
        self.loop = Loop(Workload.read(workload), device)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: object) -> None: ...

    def ask(self) -> None: ...

    def answer(self) -> dict[str, float]:
        return self.loop.round()


def test_a_sweep_varies_one_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.sweep.Neighbour", SameProcess)
    out = tmp_path / "speed.json"
    main(f"--quick --sweep width --rounds 1 --processes 1 --device cpu --out {out}".split())
    points = json.loads(out.read_text(encoding="utf-8"))["sweeps"]["width"]["points"]
    assert [point["value"] for point in points] == [0.5, 1]
    assert all(point["seconds"] > 0 and point["plain_seconds"] > 0 for point in points)
    assert "network width" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--only fmnist-21", "unknown workload 'fmnist-21': did you mean 'fmnist-20'?"),
        ("--sweep depth", "unknown sweep 'depth'"),
        ("--rounds 0", "rounds must be at least 1"),
        ("--out nowhere/file.json", "folder nowhere not found"),
        ("--out other.json", "other.json exists and is not a file of benchmark results"),
        ("--only linear-100 --data real --data-dir .", "fashion-mnist"),
    ],
)
def test_mistakes_are_told_before_anything_is_measured(
    flags: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("benchmarks.__main__.peaks", lambda *given: {})
    monkeypatch.setattr("coterie.data.datasets.DEBIAN_FASHION", tmp_path / "nothing")
    (tmp_path / "other.json").write_text('{"cells": []}', encoding="utf-8")
    with pytest.raises(SystemExit) as left:
        main(flags.split())
    assert left.value.code == 2
    assert told in capsys.readouterr().err
    assert (tmp_path / "other.json").read_text(encoding="utf-8") == '{"cells": []}'


# What a workload is.


def test_generated_data_have_the_shapes_and_sizes_of_the_workload() -> None:
    w = replace(QUICK["cifar-1000"], clients=6, joining=2, samples=30, tests=10)
    held = data(w)
    assert held.train.x.shape == (180, 3, 32, 32)
    assert held.train.x.dtype == torch.uint8
    assert (held.train.sizes, held.test.sizes) == ((30,) * 6, (10,) * 6)
    assert torch.equal(held.train.x, data(w).train.x)  # the loop's process makes them again
    assert len(participants(w)) == 2


def test_every_workload_can_be_made() -> None:
    for name, w in WORKLOADS.items():
        assert Settings(join_ratio=w.joining / w.clients).joining(w.clients) == w.joining
        assert make(w).train.local_epochs == w.epochs
        assert w.read(w.written()) == w
        assert name in tables.about({"workload": {"name": w.name}, "about": w.about})


@pytest.mark.parametrize("name", WORKLOADS)
def test_steps_are_those_that_clients_take(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    w = replace(small(name), samples=QUICK[name].samples and 70, epochs=2)
    held, counted = data(w), Counter[int]()
    plain_step = LocalTraining.step

    def step(self: LocalTraining, params: Any, loss: Any, batch: Any, *rest: Any) -> Any:
        if self.lr != getattr(make(w), "head_lr", None):  # not FedPAC's of the head alone
            counted[0] += 1 if batch.active is None else int(batch.active)
        return plain_step(self, params, loss, batch, *rest)

    monkeypatch.setattr(LocalTraining, "step", step)
    how = Execution(device="cpu", processes=1)
    federation = ours.Federation(ours.Case(w, held, how, 1).clients(), w.joining)
    counted.clear()  # of the rehearsal
    federation.round()
    assert counted[0] == sum(steps(w, held)) > 0


def test_a_wide_network_of_width_one_is_the_cnn() -> None:
    for shape in ((1, 28, 28), (3, 32, 32)):
        assert str(wide_cnn(shape, 10, 1.0)) == str(build("cnn", shape, 10, 0))
        doubled = wide_cnn(shape, 10, 2.0).state_dict()
        assert doubled["encoder.0.weight"].shape == (32, shape[0], 5, 5)
        assert doubled["head.weight"].shape == (10, 256)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("blazefl-cnn", 62_006),  # PyTorch's CIFAR-10 tutorial
        ("blazefl-resnet18", 11_181_642),  # torchvision's ResNet-18 for 10 classes
        ("pfl-cifar10", 896 + 18_496 + (14 * 14 * 64 + 1) * 128 + 1_290),
        ("flute-femnist", 1_199_882 - 1_290 + 129 * 62),  # its docstring has 10 classes
        ("flute-shakespeare", 820_522 + 2 * 4 * 256),  # Reddi et al. 2021, table 2; torch's LSTM has two biases
        ("fedjax-emnist", 1_206_590),  # Reddi et al. 2021, table 2
    ],
)
def test_networks_of_other_simulators_have_as_many_parameters_as_theirs(name: str, parameters: int) -> None:
    assert sum(p.numel() for p in network(WORKLOADS[name], data(QUICK[name])).parameters()) == parameters


def test_published_workloads_are_those_of_the_file() -> None:
    told = performance.published()
    assert set(told) == {name for name, w in WORKLOADS.items() if not w.protocol}
    for name, p in told.items():
        w = WORKLOADS[name]
        assert f"{w.rounds} rounds" in p["definition"] or p["definition"].startswith("as ")
        assert f"`{name}`" in performance.references()
        assert data(QUICK[name]).num_clients == 4


def test_a_whole_run_has_the_rounds_and_evaluations_of_its_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[bool]] = []
    federate = ours.rounds.federate

    def watched(clients: Any, settings: Settings, note: Any) -> Any:
        seen.append([])
        return federate(clients, settings, lambda record: (seen[-1].append(bool(record.scores)), note(record)))

    monkeypatch.setattr(ours.rounds, "federate", watched)
    w = replace(QUICK["blazefl-cnn"], rounds=3, evaluate_every=2)
    how = Execution(device="cpu", processes=1)
    assert ours.whole(w, how)["rounds"] == 3
    assert ours.whole(w, how, 1)["rounds"] == 1
    assert [len(own) for own in seen] == [3, 1]
    assert sum(seen[0]) == 2


# Our rounds.


def test_rounds_are_played_with_and_without_evaluation() -> None:
    federation = ours.Federation(Looped(toy.method("fedpac"), toy.model(), toy.toy(), 7, processes=1), 3)
    assert federation.round() > 0
    seconds, record = federation.round_by_phase()
    assert {key[0] for key in record.scores} >= {"pre", "post"}
    assert len(record.participants) == 3
    assert 0 < sum(record.seconds[name] for name in ours.TIMED) < seconds
    assert federation.number == 2


def test_phases_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []
    monkeypatch.setattr(ours, "synchronize", lambda: waited.append("device"))
    with ours.SynchronizedTimer().time("train"):
        waited.append("work")
    assert waited == ["device", "work", "device"]


def test_methods_without_steps() -> None:
    fedpac, fedavg = make(WORKLOADS["cifar-20"]), make(WORKLOADS["linear-100"])
    assert ours.without_steps(fedpac).train.local_epochs == 0
    assert ours.without_any_steps(fedpac).head_epochs == 0  # type: ignore[attr-defined]
    assert ours.without_steps(fedpac).head_epochs == 1  # type: ignore[attr-defined]
    assert ours.without_steps(fedavg) == ours.without_any_steps(fedavg)


def test_the_peak_of_memory_is_seen_and_forgotten() -> None:
    forget_peak()
    before = highest(os.getpid())
    if not before:
        pytest.skip("this system does not tell")
    held = torch.ones(100_000_000)  # 400 MB; some of it may lie in memory that was free
    assert highest(os.getpid()) - before > 0.2e9
    del held
    forget_peak()
    assert highest(os.getpid()) - before < 0.2e9


def test_cpu_time_counts_workers() -> None:
    with Looped(toy.method("fedavg"), toy.model(), toy.toy(), 7, processes=2).pool as pool:  # type: ignore[union-attr]
        before, own = cpu_seconds(), time.process_time()
        list(pool.map(busy, (0.3, 0.3)))
        after, own = cpu_seconds(), time.process_time() - own
    assert after - before - own == pytest.approx(0.6, abs=0.1)


def busy(seconds: float) -> None:
    start = time.process_time()
    while time.process_time() - start < seconds:
        pass


# The plain loop.


def test_the_loop_takes_the_steps_of_the_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fedreg-ragged", "linear-100"):
        w, counted = replace(small(name), epochs=2), Counter[int]()
        loop = Loop(w, "cpu")
        plain_step = torch.optim.SGD.step

        def step(self: torch.optim.SGD, *given: Any, plain: Any = plain_step, counted: Any = counted) -> Any:
            counted[0] += 1
            return plain(self, *given)

        with monkeypatch.context() as patched:
            patched.setattr(torch.optim.SGD, "step", step)
            seconds = loop.round()
        held = data(w)
        assert counted[0] == sum(steps(w, held)[i] for i in participants(w)) > 0
        assert seconds["round"] >= sum(seconds[k] for k in ("statistics", "head", "steps", "aggregation"))
        assert [c.passes for c in loop.clients] == [passes(w, held)[i] for i in participants(w)]


def test_the_loop_shares_encoders_and_keeps_heads() -> None:
    loop = Loop(QUICK["fmnist-20"], "cpu")
    start = loop.clients[0].net.state_dict()["encoder.0.weight"].clone()
    loop.round()
    first, second = (client.net.state_dict() for client in loop.clients[:2])
    assert not torch.equal(first["encoder.0.weight"], start)
    assert torch.equal(first["encoder.0.weight"], second["encoder.0.weight"])
    assert not torch.equal(first["head.weight"], second["head.weight"])


def test_the_loops_statistics_are_means_by_class() -> None:
    client = Loop(QUICK["fmnist-20"], "cpu").clients[0]
    means, squares = class_means(client, 7)
    with torch.no_grad():
        z = client.net.encoder(client.x)
    assert set(means) == set(client.y.tolist())
    for k, mean in means.items():
        torch.testing.assert_close(mean, z[client.y == k].mean(0))
        assert squares[k] == pytest.approx(float(z[client.y == k].square().sum(1).mean()), rel=1e-4)
    assert sorted(torch.cat(list(batches(client, 7))).tolist()) == list(range(40))


# The floor.


def test_operations_and_bytes_of_a_step_by_hand() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    work = step_work(net, torch.rand(5, 2, 3), torch.zeros(5, dtype=torch.int64), momentum=True)
    first, second = 2 * 5 * 6 * 4, 2 * 5 * 4 * 3
    assert work.operations == 2 * first + 3 * second  # the first layer's input needs no gradient
    weights, written = 4 * (6 * 4 + 4 + 4 * 3 + 3), 4 * 5 * (4 + 4 + 3)
    assert work.bytes == 6 * weights + 5 * 6 + 3 * written
    conv = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten())
    work = step_work(conv, torch.rand(4, 1, 5, 5), torch.zeros(4, dtype=torch.int64), momentum=False)
    assert work.operations == 2 * (2 * 4 * 2 * 9 * 9)
    assert work.bytes == 4 * 4 * 20 + 100 + 3 * 4 * (4 * 18)


def test_operations_of_recurrent_layers_are_those_of_their_cells() -> None:
    """torch counts a cell, and not a layer."""

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.head(self.layer(x)[0][:, -1])
            return made

    x, y, cell, head = torch.rand(2, 7, 4), torch.zeros(2, dtype=torch.int64), nn.LSTMCell(4, 5), nn.Linear(5, 3)
    h, c = torch.zeros(2, 5, requires_grad=True), torch.zeros(2, 5)
    with FlopCounterMode(display=False) as counter:
        for t in x.unbind(1):
            h, c = cell(t, (h, c))
        F.cross_entropy(head(h), y).backward()
    assert step_work(Last(), x, y, momentum=False).operations == counter.get_total_flops() > 0


def test_counting_leaves_the_network_as_it_was() -> None:
    w = QUICK["fmnist-20"]
    held = data(w)
    net = network(w, held)
    step_work(net, held.train.x[:8].float(), held.train.y[:8], True)
    assert not any(m._forward_hooks for m in net.modules())


def test_the_floor_is_the_slower_of_computing_and_moving() -> None:
    peaks = {"bandwidth": 10.0, "fp32": 100.0, "bf16": 1000.0}
    assert floors(Work(500, 20), peaks) == {"fp32": 5.0, "bf16": 2.0}


# What is written.


def test_a_plot_has_its_points_where_logarithms_put_them() -> None:
    drawn = plot("<title>", "clients", "seconds", {"ours": [(1, 1.0), (10, 10.0), (100, 100.0)], "loop": [(1, 5.0)]})
    root = ET.fromstring(drawn)
    circles = [c for c in root.iter() if c.tag.endswith("circle")]
    (x1, y1), (x2, y2), (x3, y3), _ = ((float(c.get("cx", 0)), float(c.get("cy", 0))) for c in circles)
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.2)
    assert y1 - y2 == pytest.approx(y2 - y3, abs=0.2)
    assert x1 < x2
    assert y2 < y1
    said = [t.text for t in root.iter() if t.tag.endswith("text")]
    assert {"<title>", "ours", "loop", "clients", "seconds", "1", "10", "100"} <= set(said)


def test_a_table_says_what_was_measured() -> None:
    parts = {"statistics": 0.25, "training": 1.0, "aggregation": 0.01, "evaluation": 0.5, "overhead": 0.001}
    way = {
        "seconds": [1.0, 3.0, 2.0],
        "plain_seconds": [10.0, 30.0, 20.0],
        "cpu_seconds": [2.0],
        "plain_cpu_seconds": [9.0],
        "times_as_fast": 10.0,
        "with_evaluation": 1.761,
        "parts": parts,
        "step_ms": 4.0,
        "plain_step_ms": 50.0,
        "wasted": 0.1234,
        "memory_gb": {"allocated": 12.5},
    }
    entry = {"workload": {"name": "w"}, "floor_ms": {"fp32": 2.0, "tf32": 0.5}, "ways": {"stacked": way}}
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in tables.table(entry).splitlines()]
    found = {line[0]: line[1] for line in lines}
    assert found[""] == "stacked"
    assert found["round without evaluation, s"] == "2"
    assert found["plain loop, s"] == "20"
    assert found["speedup of a step"] == "12.5×"
    assert found["step / floor"] == "2.0, 8.0"
    assert found["padding steps"] == "12.3 %"
    assert found["memory allocated, GB"] == "12.5"
    assert [tables.number(v) for v in (1234.5, 12.345, 0.012345, 0.0)] == ["1234", "12.3", "0.0123", "0"]


def test_the_page_on_performance_is_that_of_the_files() -> None:
    """If this fails: python -m benchmarks.performance"""
    for path, page in performance.pages().items():
        assert path.read_text(encoding="utf-8") == page


def test_a_profile_is_that_of_the_first_workload_that_has_one() -> None:
    bare, seen = (
        {"ways": {"stacked": {}}, "commit": "1"},
        {"ways": {"stacked": {"profile": {"mm": 0.5}}}, "commit": "2"},
    )
    told = performance.profiles({"abacus": {"workloads": {"cifar-20": bare, "fmnist-20": seen}}})
    assert told.startswith("`fmnist-20` on abacus, stacked (commit 2):")
    assert "| `mm`" in told
    assert "50.0" in told
    assert performance.profiles({"abacus": {"workloads": {"cifar-20": bare}}}) == ""
