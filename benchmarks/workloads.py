"""The workloads: federations of different kinds and sizes, on generated data with the shapes of real datasets."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.published import NETWORKS
from benchmarks.transformer import lora_vit
from coterie.api import make_method
from coterie.api.protocols import method_preset, preset
from coterie.core import random
from coterie.core.data import FederatedData
from coterie.core.method import AnyMethod
from coterie.core.task import Classification
from coterie.core.tasks import NextToken
from coterie.core.training import LocalTraining
from coterie.data import Dataset, divide, federate, load, transform
from coterie.data.transforms import TRANSFORMS
from coterie.methods.fedreg.rebalance import histograms
from coterie.models import MODELS, Network, build
from coterie.models.cnn import COLOUR, GREY
from coterie.models.network import conv_layers, flat_size

SEED = 0
SHAPES: dict[str, tuple[int, int, tuple[int, ...]]] = {  # training samples, test samples, shape of a sample
    "cifar10": (50_000, 10_000, (3, 32, 32)),
    "fashion-mnist": (60_000, 10_000, (1, 28, 28)),
    "femnist": (3400 * 198, 3400 * 23, (1, 28, 28)),
    "characters": (715 * 76, 715 * 11, (80,)),
    "strips": (16_000, 4_000, (3, 788, 4)),  # 197 patches, as of an image of 224 x 224 with a class token
    "tokens-64": (16_000, 4_000, (64,)),
    "tokens-80": (16_000, 4_000, (80,)),
}
CLASSES = {"femnist": 62, "characters": 90}  # others: 10
VOCABULARY = 96  # of the tokens
AVERAGE = "benchmarks.published:FedAvgWithoutTuning"


@dataclass(frozen=True)
class Workload:
    name: str
    method: str
    network: str
    dataset: str  # whose shapes are used
    clients: int
    joining: int  # clients per round
    samples: int  # training samples per client; 0: from the protocol's partition
    tests: int  # test samples per client
    epochs: int = 5
    protocol: str = "pac"  # source of learning rate, batch size, momentum and partition; "": none, and iid clients
    batch: int = 0  # samples of a batch; 0: from the protocol
    options: dict[str, int] = field(default_factory=dict)  # of the network
    lr: float = 0.0  # learning rate; 0: from the protocol
    rounds: int = 200  # of a whole run
    evaluate_every: int = 1  # rounds between evaluations of a whole run
    width: float = 1.0  # factor on the channels and units of `cnn`, or on the width of `lora-vit`, 768
    real: bool = False  # use the dataset instead of generated samples of its shape
    data_dir: str | None = None
    tiny: bool = False  # generate few samples, for tests
    on_cpu: bool = False  # takes minutes on a CPU

    @property
    def about(self) -> str:
        size = f"x {self.samples} samples" if self.samples else "of different sizes (Dirichlet 0.1)"
        taking_part = "all" if self.joining == self.clients else str(self.joining)
        wide = "" if self.width == 1 else f" {self.width:g} times as wide"
        data = f"{'' if self.real else 'shapes of '}{self.dataset}"
        method = make(self)
        return (
            f"{method.title}, {self.network}{wide}, {data}, {self.clients} clients {size}, {taking_part} in a round, "
            f"{self.epochs} local epoch{'s' if self.epochs > 1 else ''}, batch {method.train.batch_size}"
        )

    def quick(self) -> Workload:
        """A tiny version of the workload."""
        few = min(self.clients, 4)
        return replace(
            self,
            clients=few,
            joining=min(self.joining, few),
            samples=min(self.samples, 40),
            tests=20,
            epochs=1,
            tiny=True,
        )

    def written(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def read(text: str) -> Workload:
        return Workload(**json.loads(text))


WORKLOADS = {
    w.name: w
    for w in (
        Workload("cifar-20", "fedpac", "cnn", "cifar10", 20, 20, 600, 300, on_cpu=True),
        Workload("cifar-100", "fedpac", "cnn", "cifar10", 100, 30, 600, 300),
        Workload("cifar-1000", "fedpac", "cnn", "cifar10", 1000, 30, 50, 50),
        Workload("fmnist-20", "fedpac", "cnn", "fashion-mnist", 20, 20, 600, 600, on_cpu=True),
        Workload("fedreg-ragged", "fedreg", "convnet", "cifar10", 20, 20, 0, 0, epochs=1, protocol="reg"),
        Workload("resnet18-10", "fedper", "resnet18", "cifar10", 10, 10, 500, 100, epochs=1),
        Workload("resnet18-500", "local", "resnet18", "cifar10", 500, 10, 100, 20, epochs=1),
        Workload("resnet18-10-128", "fedper", "resnet18", "cifar10", 10, 10, 1280, 100, epochs=1, batch=128),
        Workload("transformer-20", "fedavg", "transformer", "tokens-64", 20, 20, 320, 64, epochs=1, batch=32),
        Workload(
            "lstm-20", "fedavg", "lstm", "tokens-80", 20, 20, 320, 64, epochs=1, batch=32,
            options={"hidden": 256, "layers": 2},
        ),
        Workload("lora-20", "fedavg", "lora-vit", "cifar10", 20, 20, 64, 16, epochs=1, batch=8),
        Workload("lora-20-4", "fedavg", "lora-vit", "cifar10", 20, 20, 32, 16, epochs=1, batch=4),
        Workload("lora-20-197", "fedavg", "lora-vit", "strips", 20, 20, 64, 16, epochs=1, batch=8),
        Workload("lora-20-small", "fedavg", "lora-vit", "cifar10", 20, 20, 64, 16, epochs=1, batch=8, width=0.125),
        Workload("linear-100", "fedavg", "linear", "fashion-mnist", 100, 100, 100, 20, on_cpu=True),
        # Those of other simulators, as results/published.json says.
        Workload(
            "blazefl-cnn", AVERAGE, "blazefl-cnn", "cifar10", 100, 100, 500, 100, protocol="", batch=50, lr=0.1,
            rounds=5,
        ),
        Workload(
            "blazefl-resnet18", AVERAGE, "resnet18-imagenet", "cifar10", 100, 100, 500, 100, protocol="", batch=50,
            lr=0.1, rounds=5,
        ),
        Workload(
            "pfl-cifar10", AVERAGE, "conv-dropout", "cifar10", 1000, 50, 50, 10, epochs=1, protocol="", batch=10,
            lr=0.1, rounds=1500, evaluate_every=10,
        ),
        Workload(
            "flute-femnist", AVERAGE, "conv-dropout", "femnist", 3400, 10, 198, 23, epochs=1, protocol="", batch=20,
            lr=0.1, rounds=1500, evaluate_every=50,
        ),
        Workload(
            "flute-shakespeare", AVERAGE, "char-lstm", "characters", 715, 10, 76, 11, epochs=1, protocol="", batch=4,
            lr=0.8, rounds=1200, evaluate_every=50,
        ),
        Workload(
            "fedjax-emnist", "fedopt", "conv-dropout", "femnist", 3400, 10, 198, 23, epochs=1, protocol="", batch=20,
            lr=10**-1.5, rounds=1500, evaluate_every=500,
        ),
    )
}  # fmt: skip


def usual(w: Workload) -> dict[str, Any]:
    """The settings of the workload's protocol."""
    return preset(w.protocol, w.dataset) if w.protocol else {"partition": "iid"}


def make(w: Workload) -> AnyMethod:
    training = {f.name for f in fields(LocalTraining)}
    settings = {k: v for k, v in usual(w).items() if k in training}
    settings |= method_preset(w.protocol, w.method) if w.protocol else {}
    own = {"local_epochs": w.epochs, **({"batch_size": w.batch} if w.batch else {}), **({"lr": w.lr} if w.lr else {})}
    return make_method(w.method, **settings | own)


def data(w: Workload) -> FederatedData:
    source = load(w.dataset, w.data_dir) if w.real else generated(w)
    if w.protocol and w.dataset in TRANSFORMS[w.protocol]:
        source = replace(source, transform=transform(w.dataset, w.protocol))
    settings: dict[str, Any] = {"num_clients": w.clients}
    if w.samples:
        settings |= {"local_size": w.samples, "test_size": w.tests}
    else:
        settings |= {"alpha": usual(w)["alpha"], "min_size": usual(w)["min_size"]}
    return federate(source, divide(source, usual(w)["partition"], **settings))


def is_tokens(w: Workload) -> bool:
    return w.dataset.startswith("tokens") or w.dataset == "characters"


def generated(w: Workload) -> Dataset:
    """Noise with a bright band, or a repeated token, that encodes the class; as many samples as the real dataset."""
    train, test, shape = SHAPES[w.dataset]
    draw, classes = torch.Generator().manual_seed(SEED), CLASSES.get(w.dataset, 10)

    def split(count: int) -> tuple[Tensor, Tensor]:
        count = count // 50 if w.tiny else count
        if w.dataset == "characters":  # the label of a character is the next one
            text = torch.randint(classes, (count, shape[0] + 1), generator=draw)
            return text[:, :-1].contiguous(), text[:, 1:].contiguous()
        y = torch.arange(count) % classes
        if is_tokens(w):
            x = torch.randint(10, VOCABULARY, (len(y), *shape), generator=draw)
            x[:, ::4] = y[:, None]
            return x, y
        x = torch.randint(0, 128, (len(y), *shape), generator=draw, dtype=torch.uint8)
        for k in range(10):
            x[y % 10 == k, :, 2 * k : 2 * k + 4] += 127
        return x, y

    task = NextToken(classes) if w.dataset == "characters" else Classification
    return Dataset(w.dataset, *split(train), *split(test), tuple(map(str, range(classes))), task=task)


def network(w: Workload, held: FederatedData) -> nn.Module:
    if w.width == 1 and w.network in MODELS:
        options = {"vocabulary": VOCABULARY, **w.options} if is_tokens(w) else w.options
        return build(w.network, held.shape, held.classes, SEED, **options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        if w.network in NETWORKS:
            return NETWORKS[w.network](held.shape, CLASSES.get(w.dataset, 10))
        if w.network == "lora-vit":
            width, depth = (24, 2) if w.tiny else (int(w.width * 768), 12)
            return lora_vit(held.shape, held.classes, width, depth)
        return wide_cnn(held.shape, held.classes, w.width)


def wide_cnn(shape: tuple[int, ...], classes: int, width: float) -> Network:
    """`cnn` with its channels and units multiplied by a factor."""
    layers = GREY if shape[0] == 1 else COLOUR
    convs = tuple(conv._replace(channels=int(width * conv.channels)) for conv in layers)
    leaky, units = nn.LeakyReLU(0.01), int(width * 128)
    flat = nn.Linear(flat_size(shape, convs), units)
    return Network(
        nn.Sequential(*conv_layers(shape[0], convs, leaky), nn.Flatten(), flat, leaky), nn.Linear(units, classes)
    )


def participants(w: Workload, round: int = 0) -> list[int]:
    chosen: list[int] = random.participants(SEED, round, w.clients, w.joining).tolist()
    return chosen


def passes(w: Workload, held: FederatedData) -> list[tuple[int, ...]]:
    """Samples of each pass of an epoch, by client; FedReG has two passes."""
    sizes = held.train.sizes
    if w.method != "fedreg":
        return [(n,) for n in sizes]
    rebalanced = histograms(held.train.class_counts(held.classes)).after.sum(1)
    return list(zip(sizes, rebalanced.tolist(), strict=True))


def steps(w: Workload, held: FederatedData) -> list[int]:
    """SGD steps per round of each client, without FedPAC's steps of the head."""
    train = make(w).train

    def in_pass(n: int) -> int:
        return n // train.batch_size if train.drop_last else -(-n // train.batch_size)

    return [w.epochs * sum(map(in_pass, own)) for own in passes(w, held)]
