"""Personal adapters and personal heads on a pretrained vision transformer, compared with full fine-tuning.

A small vision transformer is pretrained on CIFAR-100, then 20 clients with different class distributions of CIFAR-10
personalize it in four ways. For each: mean test accuracy of the personal models, bytes that crossed between server and
clients, and seconds, as JSON.

python examples/adapters.py --data FOLDER --out adapters.json
python examples/adapters.py --quick                            a smoke test on the shipped Fashion-MNIST subset

FOLDER has the datasets cifar10 and cifar100 as their publishers distribute them; `coterie data` lists the files.
"""

from __future__ import annotations

import argparse
import json
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
    local_size: int = 600  # training samples of a client
    rounds: int = 30
    local_epochs: int = 2
    rank: int = 8
    processes: int | None = None  # of clients on a CPU; None: one per core


QUICK = Plan(
    "fashion-mnist-small", "fashion-mnist-small", 3, depth=1, patch=14, epochs=1, local_size=40, rounds=1,
    local_epochs=1,
)  # fmt: skip
FLAGS = {
    "depth": "layers of the network; default: 6",
    "patch": "side of a patch in pixels; default: 4",
    "epochs": "epochs of pretraining; default: 60",
    "batch": "batch size of pretraining; default: 512",
    "local_size": "training samples of a client; default: 600",
    "rounds": "communication rounds; default: 30",
    "processes": "processes on a CPU; default: one per core",
}


@dataclass(frozen=True)
class Arm:
    """One way to personalize."""

    name: str
    method: str
    trained: str  # full: all parameters; lora: adapters and head; head
    lr: float


ARMS = (
    Arm("full fine-tuning, personal heads", "fedper", "full", 1e-4),
    Arm("shared LoRA, personal heads", "fedper", "lora", 1e-3),
    Arm("personal LoRA and heads", "ditto", "lora", 1e-3),
    Arm("personal heads only", "local", "head", 1e-3),
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
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=0.05)
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


def personalized(arm: Arm, plan: Plan, network: nn.Module, data: FederatedData, device: str) -> dict[str, Any]:
    adapted = part_of(network, arm, plan.rank)
    start = time.perf_counter()
    result = coterie.run(
        arm.method, data, adapted, rounds=plan.rounds, optimizer="adamw", lr=arm.lr, local_epochs=plan.local_epochs,
        backend=coterie.Execution(device=device, processes=plan.processes), progress=False,
    )  # fmt: skip
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    name, point = next(iter(result.method.results.items()))
    curve = result.history.curve(point)
    return {
        **asdict(arm),
        "result": name,
        "trained_parameters": trained,
        "frozen_parameters": sum(p.numel() for p in adapted.parameters()) - trained,
        "accuracy": curve[-1][1],
        "accuracy_by_round": curve,
        "bytes": sum(record.bytes_up + record.bytes_down for record in result.history),
        "seconds": time.perf_counter() - start,
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", metavar="FOLDER", help="folder with cifar10 and cifar100")
    parser.add_argument("--quick", action="store_true", help="a smoke test on data that ships with Coterie")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name, says in FLAGS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=says)
    parser.add_argument("--out", type=Path, help="JSON file to write; default: print")
    given = parser.parse_args(argv)
    named = {name: getattr(given, name) for name in FLAGS if getattr(given, name) is not None}
    plan = Plan(**{**asdict(QUICK if given.quick else Plan()), **named})
    torch.manual_seed(0)
    data = coterie.load_clients(
        plan.federated, num_clients=plan.clients, data_dir=given.data, local_size=plan.local_size,
        test_size=plan.local_size // 2,
    )  # fmt: skip
    start = time.perf_counter()
    network, tested = pretrained(plan, data.transform, given.data, given.device)
    found: dict[str, Any] = {
        "plan": asdict(plan),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if given.device != "cpu" else "cpu",
        "pretraining": {"accuracy": tested, "seconds": time.perf_counter() - start},
        "arms": [],
    }
    network.head = vit(plan, data, data.classes).head
    for arm in ARMS:
        found["arms"].append(personalized(arm, plan, network, data, given.device))
        if given.out:
            given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if not given.out:
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
