"""Personal adapters and personal heads on a pretrained vision transformer, compared with full fine-tuning.

A small vision transformer is pretrained on CIFAR-100, then 20 clients with different class distributions of CIFAR-10
personalize it in five ways. Validation samples of the first partition select each way's learning rate; every seed draws
its own partition. For each way and seed: mean test accuracy of the personal models, bytes that crossed between server
and clients, and seconds, as JSON. `python -m tools.adapters` makes the table of docs/networks.md from it.

python examples/adapters.py --data FOLDER --out adapters.json
python examples/adapters.py --quick                            a smoke test on the shipped Fashion-MNIST subset

FOLDER has the datasets cifar10 and cifar100 as their publishers distribute them; `coterie data` lists the files.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import coterie
from coterie.core import ops
from coterie.core.data import FederatedData, Transform
from coterie.core.preprocess import Preprocess
from coterie.data import Dataset, load
from coterie.models import build

ATTENTION = "encoder.*.qkv|encoder.*.out"


@dataclass(frozen=True)
class Plan:
    pretraining: str = "cifar100"
    federated: str = "cifar10"
    clients: int = 20
    depth: int = 6
    patch: int = 4
    epochs: int = 60  # of pretraining
    batch: int = 512
    local_size: int = 300  # training samples of a client
    rounds: int = 20
    local_epochs: int = 2
    rank: int = 8
    seeds: int = 3
    rates: int = 3  # learning rates that are tried
    search_rounds: int = 10  # of each trial
    processes: int | None = None  # of clients on a CPU; None: one per core


QUICK = Plan(
    "fashion-mnist-small", "fashion-mnist-small", 3, depth=1, patch=14, epochs=1, local_size=40, rounds=1,
    local_epochs=1, seeds=2, rates=1, search_rounds=1,
)  # fmt: skip
VALIDATION = 0.2  # share of a client's training samples, for learning rates only
FLAGS = {
    "depth": "layers of the network; default: 6",
    "patch": "side of a patch in pixels; default: 4",
    "epochs": "epochs of pretraining; default: 60",
    "batch": "batch size of pretraining; default: 512",
    "local_size": "training samples of a client, and half as many test samples; default: 300",
    "rounds": "communication rounds; default: 20",
    "seeds": "repetitions, each with its own partition; default: 3",
    "rates": "learning rates tried for each way, at most 3; default: 3",
    "search_rounds": "rounds of each trial; default: 10",
    "processes": "processes on a CPU; default: one per core",
}


@dataclass(frozen=True)
class Arm:
    """One way to personalize."""

    name: str
    method: str
    trained: str  # full: all parameters; lora: adapters and head; head
    rates: tuple[float, ...]  # learning rates, the most likely one first


ARMS = (
    Arm("full fine-tuning, personal heads", "fedper", "full", (3e-4, 1e-3, 1e-4)),
    Arm("shared LoRA, personal heads", "fedper", "lora", (3e-3, 1e-3, 1e-2)),
    Arm("personal and shared LoRA and heads", "ditto", "lora", (3e-3, 1e-3, 1e-2)),
    Arm("personal LoRA and heads, each client alone", "local", "lora", (3e-3, 1e-3, 1e-2)),
    Arm("personal heads, each client alone", "local", "head", (1e-2, 3e-3, 3e-2)),
)


def vit(plan: Plan, data: Dataset | FederatedData, classes: int) -> nn.Module:
    shape = data.shape if isinstance(data, FederatedData) else tuple(data.x_train.shape[1:])
    return build("vit-tiny", shape, classes, seed=0, patch=plan.patch, depth=plan.depth)


def pretrained(plan: Plan, transform: Transform, data_dir: str | None, device: str) -> tuple[nn.Module, float]:
    """A network trained on the other dataset, and its test accuracy. transform: that of the federated data."""
    source = load(plan.pretraining, data_dir)
    network, prepare = vit(plan, source, len(source.classes)).to(device), Preprocess(transform).to(device)
    x, y = source.x_train.to(device), source.y_train.to(device)
    steps = plan.epochs * -(-len(y) // plan.batch)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=0.05, fused=device != "cpu")
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps, pct_start=0.1)
    for index in batches(len(y), plan):
        index = index.to(device)
        bits = torch.randint(0, 2**62, index.shape, device=device)
        images = ops.augment(x[index], bits, transform) if transform.crop else x[index]
        with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
            logits = network(prepare(images))
        loss = F.cross_entropy(logits.float(), y[index], label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    tested = accuracy(network, prepare, source.x_test.to(device), source.y_test.to(device))
    return network.cpu(), tested


def batches(samples: int, plan: Plan) -> Iterator[Tensor]:
    for _ in range(plan.epochs):
        yield from torch.randperm(samples).split(plan.batch)


@torch.no_grad()
def accuracy(network: nn.Module, prepare: nn.Module, x: Tensor, y: Tensor) -> float:
    network.eval()
    parts = zip(x.split(500), y.split(500), strict=True)
    right = sum(int((network(prepare(images)).argmax(1) == labels).sum()) for images, labels in parts)
    return right / len(y)


def part_of(network: nn.Module, arm: Arm, rank: int) -> nn.Module:
    """The network with the trainable part of an arm."""
    if arm.trained == "lora":
        return coterie.lora(network, ATTENTION, rank=rank, except_="head")
    return coterie.freeze(network, except_="head" if arm.trained == "head" else "*")


class Experiment:
    """The pretrained network, and the federated data by seed."""

    def __init__(self, plan: Plan, network: nn.Module, data_dir: str | None, device: str, precision: str) -> None:
        self.plan, self.network, self.data_dir = plan, network, data_dir
        self.how = coterie.Execution(device=device, precision=precision, processes=plan.processes)
        self.searched = clients_of(plan, data_dir, 0, VALIDATION)
        self.data = [clients_of(plan, data_dir, seed) for seed in range(plan.seeds)]

    def trained(self, arm: Arm, data: FederatedData, seed: int, lr: float, rounds: int) -> coterie.Result:
        """A federated run that starts with the pretrained encoder and a head that the seed draws."""
        torch.manual_seed(seed)
        adapted = part_of(self.network, arm, self.plan.rank)
        torch.nn.init.trunc_normal_(adapted.head.weight, std=0.02)
        return coterie.run(
            arm.method, data, adapted, rounds=rounds, optimizer="adamw", lr=lr, seed=seed,
            local_epochs=self.plan.local_epochs, backend=self.how, progress=False,
        )  # fmt: skip

    def rate(self, arm: Arm) -> tuple[float, dict[float, float]]:
        """The learning rate with the best validation accuracy of the first partition, and all of these."""
        rates = arm.rates[: self.plan.rates]
        if len(rates) == 1:
            return rates[0], {}
        scores = {}
        for lr in rates:
            result = self.trained(arm, self.searched, 0, lr, self.plan.search_rounds)
            _, point = next(iter(result.method.results.items()))
            scores[lr] = result.history.curve(point, "validation")[-1][1]
        return max(rates, key=lambda lr: scores[lr]), scores

    def repeated(self, arm: Arm, seed: int, lr: float) -> dict[str, Any]:
        start = time.perf_counter()
        result = self.trained(arm, self.data[seed], seed, lr, self.plan.rounds)
        seconds = time.perf_counter() - start
        _, point = next(iter(result.method.results.items()))
        curve = result.history.curve(point)
        return {
            "seed": seed,
            "accuracy": curve[-1][1],
            "accuracy_by_round": curve,
            "bytes": sum(record.bytes_up + record.bytes_down for record in result.history),
            "seconds": seconds,
        }

    def described(self, arm: Arm) -> dict[str, Any]:
        sizes = [(p.numel(), p.requires_grad) for p in part_of(self.network, arm, self.plan.rank).parameters()]
        trained = sum(size for size, is_trained in sizes if is_trained)
        lr, scores = self.rate(arm)
        return {
            "name": arm.name,
            "method": arm.method,
            "trained": arm.trained,
            "trained_parameters": trained,
            "frozen_parameters": sum(size for size, _ in sizes) - trained,
            "lr": lr,
            "validation_accuracy": scores,
            "runs": [],
        }


def clients_of(plan: Plan, data_dir: str | None, seed: int, validation: float = 0.0) -> FederatedData:
    return coterie.load_clients(
        plan.federated, seed=seed, num_clients=plan.clients, data_dir=data_dir, partition="dominant",
        partition_seed="vary", local_size=plan.local_size, test_size=plan.local_size // 2, validation=validation,
    )  # fmt: skip


def sizes(name: str, data_dir: str | None) -> dict[str, int]:
    """Images in the files; a folder may hold a part of a dataset."""
    stored = load(name, data_dir)
    return {"train": len(stored.y_train), "test": len(stored.y_test)}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", metavar="FOLDER", help="folder with cifar10 and cifar100")
    parser.add_argument("--quick", action="store_true", help="a smoke test on data that ships with Coterie")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", default="fp32", help="of federated training: fp32, tf32 or bf16; default: fp32")
    parser.add_argument("--commit", default="", help="commit to record in the file")
    for name, says in FLAGS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=says)
    parser.add_argument("--out", type=Path, help="JSON file, written after every run; default: print at the end")
    given = parser.parse_args(argv)
    named = {name: getattr(given, name) for name in FLAGS if getattr(given, name) is not None}
    plan = Plan(**{**asdict(QUICK if given.quick else Plan()), **named})
    torch.manual_seed(0)
    data = clients_of(plan, given.data, 0)
    start = time.perf_counter()
    network, tested = pretrained(plan, data.transform, given.data, given.device)
    took = time.perf_counter() - start
    found: dict[str, Any] = {
        "plan": asdict(plan),
        "commit": given.commit,
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if given.device != "cpu" else "cpu",
        "precision": given.precision,
        "images": {name: sizes(name, given.data) for name in {plan.pretraining: 0, plan.federated: 0}},
        "pretraining": {"accuracy": tested, "seconds": took},
        "arms": [],
    }
    network.head = vit(plan, data, data.classes).head
    print(f"pretrained: accuracy {tested:.3f}, {took:.0f} s", file=sys.stderr)
    experiment = Experiment(plan, network, given.data, given.device, given.precision)

    def keep(done: str) -> None:
        found["seconds"] = time.perf_counter() - start
        print(f"{found['seconds']:.0f} s: {done}", file=sys.stderr)
        if given.out:
            given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    for arm in ARMS:
        found["arms"].append(experiment.described(arm))
        keep(f"{arm.name}: learning rate {found['arms'][-1]['lr']:g}")
    for seed in range(plan.seeds):
        for arm, entry in zip(ARMS, found["arms"], strict=True):
            entry["runs"].append(experiment.repeated(arm, seed, entry["lr"]))
            keep(f"{arm.name}, seed {seed}: accuracy {entry['runs'][-1]['accuracy']:.3f}")
    if not given.out:
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
