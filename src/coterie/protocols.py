"""The settings that each paper uses for all its methods, by name."""

from __future__ import annotations

from typing import Any, NamedTuple

from coterie.core.errors import unknown


class Protocol(NamedTuple):
    paper: str
    settings: dict[str, Any]
    datasets: dict[str, dict[str, Any]]  # what differs by dataset
    methods: dict[str, dict[str, Any]]  # how this paper sets the methods that it compares


GREY = ("mnist", "fashion-mnist", "fashion-mnist-small", "emnist")
COLOUR = ("cifar10", "cifar100", "cinic10")
TABLE = {"model": "mlp", "batch": 16, "lr": 0.05}  # samples that are rows of numbers
TABLES = {"heart-disease": {**TABLE, "partition": "natural"}}

PROTOCOLS = {  # the first is that of a plain run
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
        {**{name: {"lr": 0.02} for name in COLOUR}, "emnist": {"batch": 100}, **TABLES},
        {"pfedhn": {"lr": 0.01}},  # otherwise the methods' own defaults are this paper's
    ),
    "reg": Protocol(
        "FedReG",
        {
            "partition": "dirichlet",
            "alpha": 0.1,
            "model": "convnet",
            "rounds": 100,
            "join_ratio": 0.2,
            "batch": 20,
            "momentum": 0.9,
            "drop_last": True,
            "keep": True,
            "min_size": 80,  # 20 samples for testing, and one batch at least for training
        },
        TABLES,
        {
            "fedprox": {"pull": 0.001},
            "feddyn": {"pull": 0.01},
            "fedrep": {"head_epochs": 5, "encoder_epochs": 5, "average_heads": True},
            "fedper": {"average_heads": True},
            "fedbabu": {"finetune": "head", "finetune_epochs": 10},
            "gpfl": {"pull": 1e-3, "table_decay": 0.1, "average_heads": True},
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
            "lr_steps": ((50, 0.2), (75, 0.02)),
        },
        {"cifar100": {"model": "resnet18"}, **TABLES},
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
            "batch": 128,
            "momentum": 0.9,
            "weight_decay": 5e-4,
            "drop_last": True,
            "keep": True,
            "lr_decay": 0.9,
        },
        {
            **{name: {"rounds": 50} for name in GREY},
            "cifar10": {"rounds": 100},
            "cifar100": {"rounds": 40, "model": "resnet18"},
            **TABLES,
        },
        {
            "fedrep": {"head_epochs": 5, "encoder_epochs": 2},
            "fedpac": {"align": 1.0},
            "gpfl": {"pull": 1e-2, "table_decay": 0.1},
        },
    ),
}


def preset(protocol: str, dataset: str, shape: tuple[int, ...] = ()) -> dict[str, Any]:
    """Setting -> value, as this paper has it for this dataset; for one that it does not know, by a sample's shape."""
    chosen = find(protocol)
    return {**chosen.settings, **chosen.datasets.get(dataset, TABLE if len(shape) == 1 else {})}


def method_preset(protocol: str, method: str) -> dict[str, Any]:
    """Setting of the method -> value, as this paper has it; what is not here is as the method says."""
    return dict(find(protocol).methods.get(method, {}))


def presets(dataset: str) -> list[dict[str, Any]]:
    """Of all protocols, that of a plain run first."""
    return [preset(protocol, dataset) for protocol in PROTOCOLS]


def method_presets(method: str) -> list[dict[str, Any]]:
    """The same of a method."""
    return [method_preset(protocol, method) for protocol in PROTOCOLS]


def find(protocol: str) -> Protocol:
    if protocol not in PROTOCOLS:
        raise unknown("protocol", protocol, PROTOCOLS)
    return PROTOCOLS[protocol]
