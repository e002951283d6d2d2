"""Which data a federation has, by the names that a user gives."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from coterie.core.errors import unknown
from coterie.core.samples import FederatedData
from coterie.data import PARTITIONS, Dataset, Partition, divide, load, normalised, transform
from coterie.data import federate as gather
from coterie.data.own import Reading, is_path, read_own
from coterie.protocols import preset

RULE_SETTINGS = ("num_clients", "alpha", "noniid_s", "local_size", "test_size", "min_size")


@dataclass(frozen=True)
class DataSettings(Reading):
    """Which data, and how they come to the clients. What a partition rule does not ask for must stay unset."""

    dataset: str = field(
        default="fashion-mnist-small",
        metadata={"help": "dataset (`coterie data` lists them), or the path of data of your own"},
    )
    data_dir: str | None = field(default=None, metadata={"help": "folder with datasets (or set COTERIE_DATA)"})
    protocol: str = field(default="pac", metadata={"help": "defaults as in a paper: pac, reg, crc or akd"})
    partition: str | None = field(default=None, metadata={"help": "partition rule, or a partition.npz of a run"})
    num_clients: int | None = field(
        default=None, metadata={"help": "number of clients", "flags": ("num-clients", "nc")}
    )
    alpha: float | None = field(default=None, metadata={"help": "Dirichlet parameter; smaller is more uneven"})
    noniid_s: float | None = field(
        default=None, metadata={"help": "percent of a client's samples that are spread evenly over classes"}
    )
    local_size: int | None = field(default=None, metadata={"help": "training samples of a client"})
    test_size: int | None = field(default=None, metadata={"help": "test samples of a client"})
    min_size: int | None = field(default=None, metadata={"help": "smallest client that a Dirichlet partition may have"})
    partition_seed: int | None = field(default=None, metadata={"help": "seed of the partition, where it is random"})
    validation: float = field(default=0.0, metadata={"help": "share of the training samples set aside for validation"})
    normalise: str | None = field(
        default=None,
        metadata={"help": "auto: by the training samples' mean and deviation; none; usually the protocol's"},
    )


def load_clients(dataset: str = "fashion-mnist-small", **settings: Any) -> FederatedData:
    """The data of a federation, by the names of DataSettings."""
    known = [f.name for f in fields(DataSettings)]
    for name in settings:
        if name not in known:
            raise unknown("data setting", name, known)
    wanted = DataSettings(dataset, **settings)
    source = find_data(wanted)
    usual = preset(wanted.protocol, source.name, tuple(source.x_train.shape[1:]))
    rule = wanted.partition or ("natural" if source.owners else usual["partition"])
    if rule.endswith(".npz"):
        partition = Partition.load(Path(rule))
    else:
        partition = divide(source, rule, **rule_settings(wanted, rule, usual))
    data = gather(source, partition, wanted.validation, wanted.partition_seed or 0)
    return normalised(data, source.transform, wanted.normalise)


def find_data(wanted: DataSettings) -> Dataset:
    """A dataset by its name, or the user's own by its path."""
    if is_path(wanted.dataset):
        return read_own(wanted.dataset, wanted)
    source = load(wanted.dataset, wanted.data_dir)
    return replace(source, transform=transform(source.name, wanted.protocol))


def rule_settings(wanted: DataSettings, rule: str, usual: Mapping[str, Any]) -> dict[str, Any]:
    """What the user said, then what the protocol says; the rule checks the names and knows the rest."""
    given = {name: value for name in RULE_SETTINGS if (value := getattr(wanted, name)) is not None}
    if rule in PARTITIONS:
        takes = inspect.signature(PARTITIONS[rule]).parameters
        for name in RULE_SETTINGS:
            if name in takes and name in usual and (wanted.partition is None or rule == usual["partition"]):
                given.setdefault(name, usual[name])
        if wanted.partition_seed is not None and "seed" in takes:
            given["seed"] = wanted.partition_seed
    return given
