"""The data of a federation, by the names that a user gives."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from coterie.api.protocols import preset
from coterie.core.data import FederatedData
from coterie.core.errors import CoterieError, unknown
from coterie.core.task import Task
from coterie.data import PARTITIONS, TRANSFORMS, Dataset, Partition, divide, filled, load, normalised, transform
from coterie.data import federate as gather
from coterie.data.settings import at_least
from coterie.data.task_choice import with_task
from coterie.data.user import Reading, is_path, read_own

VARY = "vary"
FOR_ALL = ("channel_axis", "resize", "task", "task_args", "metric")  # settings of Reading for all datasets
RULE_SETTINGS = ("num_clients", "alpha", "noniid_s", "local_size", "test_size", "min_size")


@dataclass(frozen=True)
class DataSettings(Reading):
    """Which data, and how they are divided among clients. Settings that a partition rule does not take stay unset."""

    dataset: str = field(
        default="fashion-mnist-small",
        metadata={"help": "dataset (`coterie data` lists them), or the path of your own data"},
    )
    data_dir: str | None = field(default=None, metadata={"help": "folder with datasets (or set COTERIE_DATA)"})
    protocol: str = field(
        default="pac",
        metadata={"help": "paper whose settings are the defaults: pac, reg, crc or akd; quick: for a first look"},
    )
    partition: str | None = field(default=None, metadata={"help": "partition rule, or a partition.npz of a run"})
    num_clients: int | None = field(default=None, metadata={"help": "number of clients", "short": ("nc",)})
    alpha: float | None = field(default=None, metadata={"help": "Dirichlet parameter; smaller is more uneven"})
    noniid_s: float | None = field(
        default=None, metadata={"help": "percent of a client's samples that are spread evenly over all classes"}
    )
    local_size: int | None = field(default=None, metadata={"help": "training samples of a client"})
    test_size: int | None = field(default=None, metadata={"help": "test samples of a client"})
    min_size: int | None = field(default=None, metadata={"help": "smallest client that a Dirichlet partition may have"})
    partition_seed: int | str | None = field(
        default=None,
        metadata={"help": "seed of a random partition; vary: every seed of a run draws its own partition"},
    )
    validation: float = field(default=0.0, metadata={"help": "share of the training samples set aside for validation"})
    normalise: str | None = field(
        default=None,
        metadata={
            "help": "auto: by the training samples' mean and standard deviation; none; default: set by --protocol"
        },
    )


def load_clients(
    dataset: str | os.PathLike[str] = "fashion-mnist-small",
    *,
    seed: int | None = None,
    task: str | type[Task] | Task | None = None,
    task_args: Mapping[str, Any] | str | None = None,
    **settings: Any,
) -> FederatedData:
    """Load a dataset and divide it among clients.

    dataset: a name that `coterie data` lists, or the path of your own data. A pathlib.Path is always a path.
    seed: of the run, for partition_seed="vary", with which every seed draws its own partition.
    task: of your own data: its name, import path or class, or a Task; default: guessed from the labels.
    task_args: options of the task, such as {"label_smoothing": 0.1}.
    settings: fields of DataSettings, such as metric, num_clients, partition, alpha or validation. Default: the
    protocol's.

    >>> import coterie
    >>> coterie.load_clients("fashion-mnist-small", num_clients=5, partition="dirichlet", alpha=0.5)
    FederatedData fashion-mnist-small: 5 clients, 10 classes (T-shirt/top, Trouser, Pullover and 7 more)
    ...
    """
    known = [f.name for f in fields(DataSettings)]
    for name in settings:
        if name not in known:
            raise unknown("data setting", name, known)
    kind = task if task is None or isinstance(task, str) else task.name
    named = dataset if isinstance(dataset, str) else os.path.join(os.curdir, dataset)  # has a separator: a path
    wanted = DataSettings(named, task=kind, **settings)
    varies = wanted.partition_seed == VARY
    wanted = replace(wanted, partition_seed=drawn_by(wanted.partition_seed, seed))
    source = find_data(wanted, type(task) if isinstance(task, Task) else task if isinstance(task, type) else None)
    usual = preset(wanted.protocol, source.name, tuple(source.x_train.shape[1:]), wanted.num_clients)
    rule = wanted.partition or ("natural" if source.owners else usual["partition"])
    if varies and not is_random(rule):
        raise CoterieError(f"partition_seed 'vary': the partition {rule} is not random, so there is nothing to vary")
    if rule.endswith(".npz"):
        partition = Partition.load(Path(rule))
    else:
        partition = divide(source, rule, **rule_settings(wanted, rule, usual))
    if varies:
        partition = replace(partition, settings={**partition.settings, "partition_seed": VARY})
    data = gather(source, partition, wanted.validation, int(wanted.partition_seed or 0))
    data = filled(with_task(data, task, wanted.metric, task_args), wanted.missing)
    return normalised(data, data.transform, wanted.normalise, wanted.channel_axis)


def drawn_by(partition_seed: int | str | None, seed: int | None) -> int | None:
    """The seed of the partition in a run with this seed."""
    if partition_seed is None:
        return None
    if isinstance(partition_seed, int):
        at_least(0, partition_seed=partition_seed)
        return partition_seed
    if partition_seed != VARY:
        raise CoterieError(f"partition_seed must be a whole number or 'vary', got {partition_seed!r:.40}")
    if seed is None:
        raise CoterieError(
            "partition_seed 'vary' needs the seed of the run: pass seed=0, seed=1, ... or a number as partition_seed"
        )
    return seed


def is_random(rule: str) -> bool:
    return rule in PARTITIONS and "seed" in inspect.signature(PARTITIONS[rule]).parameters


def find_data(wanted: DataSettings, task: type[Task] | None = None) -> Dataset:
    """A dataset by its name, or the user's own data by their path. task: of the latter, if it has no name."""
    if is_path(wanted.dataset):
        return read_own(wanted.dataset, wanted, task)
    for own in fields(Reading):
        if getattr(wanted, own.name) != own.default and own.name not in FOR_ALL:
            raise CoterieError(f"--{own.name.replace('_', '-')} is for your own data, not for {wanted.dataset}")
    source = load(wanted.dataset, wanted.data_dir, wanted.resize)
    if source.transform.columns or source.name not in TRANSFORMS["pac"]:
        return source
    return replace(source, transform=transform(source.name, wanted.protocol))


def rule_settings(wanted: DataSettings, rule: str, usual: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a partition rule: the user's, then the protocol's; the rule checks names and has defaults."""
    given = {name: value for name in RULE_SETTINGS if (value := getattr(wanted, name)) is not None}
    if rule in PARTITIONS:
        takes = inspect.signature(PARTITIONS[rule]).parameters
        for name in RULE_SETTINGS:
            if name in takes and name in usual and (wanted.partition is None or rule == usual["partition"]):
                given.setdefault(name, usual[name])
        if wanted.partition_seed is not None and "seed" in takes:
            given["seed"] = wanted.partition_seed
    return given
