"""Datasets, partitions and scenarios; `data/user/` reads users' files."""

from coterie.data.dataset import Dataset
from coterie.data.datasets import DATASETS, is_available, load
from coterie.data.describe import describe_input
from coterie.data.gather import divide, federate
from coterie.data.partition import Labels, Partition
from coterie.data.picture import picture
from coterie.data.scenarios import PARTITIONS
from coterie.data.statistics import filled, normalised
from coterie.data.transforms import TRANSFORMS, transform

__all__ = [
    "DATASETS",
    "PARTITIONS",
    "TRANSFORMS",
    "Dataset",
    "Labels",
    "Partition",
    "describe_input",
    "divide",
    "federate",
    "filled",
    "is_available",
    "load",
    "normalised",
    "picture",
    "transform",
]
