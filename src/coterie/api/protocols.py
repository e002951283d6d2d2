"""The settings that each paper uses for all its methods, and those of a quick look. Recipes take theirs from here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from coterie.core.errors import unknown

Settings = dict[str, Any]


class Protocol(NamedTuple):
    paper: str
    settings: Settings
    datasets: dict[str, Settings]  # what differs by dataset
    methods: dict[str, Settings]  # hyper-parameters of the methods that this paper compares
    by_dataset: Mapping[str, dict[str, Settings]] = MappingProxyType(
        {}
    )  # dataset -> method -> settings that depend on it
    by_clients: Mapping[int, Settings] = MappingProxyType({})  # what differs from this many clients on


GREY = ("mnist", "fashion-mnist", "fashion-mnist-small", "emnist")
COLOUR = ("cifar10", "cifar100", "cinic10")
TABLE = {"model": "mlp", "batch_size": 16, "lr": 0.05}  # samples that are rows of numbers
INCLUDED = {  # the included datasets that have clients of their own
    "heart-disease": {**TABLE, "partition": "natural"},
    "presidents": {"model": "lstm", "batch_size": 32, "lr": 1.0, "local_epochs": 1, "partition": "natural"},
}

PROTOCOLS = {  # the first is the default
    "pac": Protocol(
        "FedPAC, ICLR 2023",
        {
            "partition": "dominant",
            "model": "cnn",
            "lr": 0.01,
            "momentum": 0.5,
            "weight_decay": 5e-4,
            "full_last_round": True,
        },
        {**{name: {"lr": 0.02} for name in COLOUR}, "emnist": {"batch_size": 100}, **INCLUDED},
        {
            "pfedhn": {"lr": 0.01},  # "both the server and client learning rate", appendix B
            "fedrep": {"head_epochs": 10, "encoder_epochs": 1},
            "pfedme": {"personal_lr": 0.005},
            "fedem": {"train_all": True, "finetune_all": True},
            "scaffold": {"controls_of_participants": True},
        },
    ),
    "reg": Protocol(
        "FedReG",
        {
            "partition": "dirichlet",
            "alpha": 0.1,
            "model": "convnet",
            "rounds": 100,
            "join_ratio": 0.2,
            "batch_size": 20,
            "momentum": 0.9,
            "drop_last": True,
            "keep_momentum": True,
            "min_size": 80,  # 20 samples for testing, and one batch at least for training
        },
        INCLUDED,
        {
            "fedprox": {"pull": 0.001},
            "feddyn": {"pull": 0.01},
            "fedrep": {"head_epochs": 5, "encoder_epochs": 5, "average_heads": True},
            "fedper": {"average_heads": True},
            "fedbabu": {"finetune": "head", "finetune_epochs": 10},
            "ditto": {"personal_epochs": 5},
            "gpfl": {"pull": 1e-3, "table_decay": 0.1, "average_heads": True},
        },
        by_clients={
            100: {"batch_size": 10, "min_size": 40},
            200: {"batch_size": 1, "min_size": 4},
            500: {"batch_size": 1, "min_size": 1},
        },
    ),
    "crc": Protocol(
        "FedCRC",
        {
            "partition": "dirichlet-crc",
            "model": "conv4",
            "num_clients": 100,
            "rounds": 100,
            "join_ratio": 0.1,
            "lr": 0.05,
            "momentum": 0.9,
            "schedule": "steps:50=0.2:75=0.02",
        },
        {"cifar100": {"model": "resnet18"}, **INCLUDED},
        {
            "fedprox": {"pull": 0.1},
            "fedper": {"keep_head": False, "average_heads": True},
            "fedrep": {"head_epochs": 5, "encoder_epochs": 1, "average_heads": True},
            "fedbabu": {"finetune": "none"},
        },
    ),
    "akd": Protocol(
        "PFAKD",
        {
            "partition": "dirichlet",
            "alpha": 0.5,
            "model": "akd-cnn",
            "num_clients": 10,
            "batch_size": 128,
            "momentum": 0.9,
            "weight_decay": 5e-4,
            "drop_last": True,
            "keep_momentum": True,
            "schedule": "exponential:0.9",
        },
        {
            **{name: {"rounds": 50} for name in GREY},
            "cifar10": {"rounds": 100},
            "cifar100": {"rounds": 40, "model": "resnet18"},
            **INCLUDED,
        },
        {
            "fedrep": {"head_epochs": 5, "encoder_epochs": 1},
            "fedpac": {"align": 1.0},
            "gpfl": {"pull": 1e-2, "table_decay": 0.1},
        },
        by_dataset={"cifar100": {"fedpac": {"align": 1e-3}, "gpfl": {"pull": 1e-4}}},
    ),
    "quick": Protocol(
        "Coterie: seconds for each method, on few clients and rounds; methods have their own papers' defaults",
        {
            "partition": "dominant",
            "num_clients": 10,
            "noniid_s": 20.0,
            "local_size": 150,
            "test_size": 150,
            "model": "cnn",
            "rounds": 5,
            "batch_size": 25,
            "lr": 0.01,
            "momentum": 0.5,
        },
        INCLUDED,
        {},
    ),
}


def preset(protocol: str, dataset: str, shape: tuple[int, ...] = (), num_clients: int | None = None) -> Settings:
    """Setting -> value in this paper, for this dataset and number of clients.

    shape: of a sample, which decides for datasets that the paper does not use.
    """
    chosen = find(protocol)
    found = {**chosen.settings, **chosen.datasets.get(dataset, by_shape(shape))}
    reached = [n for n in chosen.by_clients if num_clients is not None and num_clients >= n]
    return found | (chosen.by_clients[max(reached)] if reached else {})


def by_shape(shape: tuple[int, ...]) -> Settings:
    """What samples of this shape need where the paper does not say. The longer axis of a series is time."""
    if len(shape) == 2:
        return {"model": "cnn1d" if shape[0] <= shape[1] else "lstm"}
    return TABLE if len(shape) == 1 else {}


def method_preset(protocol: str, method: str, dataset: str = "") -> Settings:
    """Setting of the method -> value in this paper; others keep the method's default."""
    chosen = find(protocol)
    return {**chosen.methods.get(method, {}), **chosen.by_dataset.get(dataset, {}).get(method, {})}


def presets(dataset: str) -> list[Settings]:
    """The presets of all protocols, the default one first."""
    return [preset(protocol, dataset) for protocol in PROTOCOLS]


def method_presets(method: str) -> list[Settings]:
    """The presets of a method in all protocols."""
    return [method_preset(protocol, method) for protocol in PROTOCOLS]


def find(protocol: str) -> Protocol:
    if protocol not in PROTOCOLS:
        raise unknown("protocol", protocol, PROTOCOLS)
    return PROTOCOLS[protocol]
