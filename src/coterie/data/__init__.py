"""Datasets, and ways to divide them among clients."""

from coterie.data.datasets import DATASETS, Dataset, at_hand, load
from coterie.data.gather import divide, federate
from coterie.data.partition import Labels, Partition
from coterie.data.picture import picture
from coterie.data.scenarios import PARTITIONS
from coterie.data.statistics import normalised
from coterie.data.transforms import TRANSFORMS, transform

__all__ = [
    "DATASETS",
    "PARTITIONS",
    "TRANSFORMS",
    "Dataset",
    "Labels",
    "Partition",
    "at_hand",
    "divide",
    "federate",
    "load",
    "normalised",
    "picture",
    "transform",
]
