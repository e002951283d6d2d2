"""Datasets by name, read from local files. Nothing is downloaded here; `coterie data get` does."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from coterie.core.errors import CoterieError, unknown
from coterie.data import heart, presidents
from coterie.data import image_datasets as images
from coterie.data.dataset import Dataset, Files
from coterie.data.schools import PUPILS, SCHOOLS, read_schools

SHIPPED = Path(__file__).parent / "shipped"
DEBIAN_FASHION = Path("/usr/share/datasets/fashion-mnist")
INCLUDED = "Coterie: included"
KRIZHEVSKY = "Alex Krizhevsky (cs.toronto.edu/~kriz/cifar.html, 'python version')"


class Source(NamedTuple):
    """A dataset that `load` reads, and where its files are."""

    read: Callable[[Files], Dataset]
    description: str
    origin: str  # who publishes the files
    folders: tuple[str, ...] = ()  # subfolders to search
    files: tuple[str, ...] = ()  # files or folders that are needed, gzipped or not; empty: included


DATASETS: dict[str, Source] = {
    "fashion-mnist-small": Source(
        partial(images.read_small, SHIPPED),
        "9,000 + 2,250 grayscale images of Fashion-MNIST, 10 garments",
        INCLUDED,
    ),
    "heart-disease": Source(
        partial(heart.read_heart, SHIPPED, "disease"), "920 patients of four hospitals, heart disease or none", INCLUDED
    ),
    "heart-grades": Source(
        partial(heart.read_heart, SHIPPED, "grades"),
        "the same patients, five grades of disease from none (45 %) to severe (3 %)",
        INCLUDED,
    ),
    "heart-findings": Source(
        partial(heart.read_heart, SHIPPED, "findings"),
        "851 of them, multi-label: five risk factors and findings",
        INCLUDED,
    ),
    "heart-rate": Source(
        partial(heart.read_heart, SHIPPED, "rate"), "865 of them, regression: the maximum heart rate", INCLUDED
    ),
    "presidents": Source(
        partial(presidents.read_presidents, SHIPPED),
        "State of the Union addresses of 43 presidents, next character",
        INCLUDED,
    ),
    "schools": Source(
        read_schools,
        "7,185 pupils of 160 schools, regression: mathematics achievement",
        "R's package nlme, as CSV in Rdatasets (vincentarelbundock.github.io/Rdatasets)",
        ("schools",),
        (PUPILS, SCHOOLS),
    ),
    "fashion-mnist": Source(
        partial(images.read_mnist_family, "fashion-mnist", images.GARMENTS),
        "60,000 + 10,000 grayscale images, 10 garments",
        "Zalando Research (github.com/zalandoresearch/fashion-mnist) or Debian's package dataset-fashion-mnist",
        ("FashionMNIST/raw",),
        images.idx_files(),
    ),
    "mnist": Source(
        partial(images.read_mnist_family, "mnist", images.DIGITS),
        "60,000 + 10,000 grayscale images, 10 digits",
        "Yann LeCun and Corinna Cortes (yann.lecun.com/exdb/mnist)",
        ("MNIST/raw",),
        images.idx_files(),
    ),
    "emnist": Source(
        images.read_emnist,
        "EMNIST ByClass: 697,932 + 116,323 grayscale images, 62 digits and letters",
        "NIST (nist.gov/itl/products-and-services/emnist-dataset)",
        ("EMNIST/raw", "gzip"),
        images.idx_files("emnist-byclass-", "test"),
    ),
    "cifar10": Source(
        images.read_cifar10,
        "50,000 + 10,000 color images, 10 classes",
        KRIZHEVSKY,
        ("cifar-10-batches-py",),
        (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"),
    ),
    "cifar100": Source(
        images.read_cifar100,
        "50,000 + 10,000 color images, 100 classes",
        KRIZHEVSKY,
        ("cifar-100-python",),
        ("train", "test", "meta"),
    ),
    "cinic10": Source(
        images.read_cinic10,
        "90,000 + 90,000 color images, 10 classes (its train and test folders)",
        "the University of Edinburgh (datashare.ed.ac.uk/handle/10283/3192)",
        ("CINIC-10", "cinic-10", "cinic10"),
        ("train", "test"),
    ),
}


def plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


ALIASES = {
    **{plain(name): name for name in DATASETS},
    "fmnist": "fashion-mnist",
    "fmnistsmall": "fashion-mnist-small",
    "emnistbyclass": "emnist",
    "heart": "heart-disease",
    "sotu": "presidents",
    "hsb": "schools",
}


def known_as(name: str) -> str:
    """The name of a dataset in DATASETS, from any spelling."""
    if plain(name) not in ALIASES:
        raise unknown("dataset", name, DATASETS)
    return ALIASES[plain(name)]


def is_known(name: str) -> bool:
    return plain(name) in ALIASES


def load(name: str, data_dir: str | os.PathLike[str] | None = None) -> Dataset:
    """Load a dataset by name from `data_dir` (default: $COTERIE_DATA, else ~/.cache/coterie)."""
    known = known_as(name)
    return DATASETS[known].read(find(known, roots(data_dir)))


def at_hand(name: str, data_dir: str | os.PathLike[str] | None = None) -> bool:
    """Whether `load` would find the dataset's files. Does not read them."""
    try:
        find(name, roots(data_dir))
    except CoterieError:
        return False
    return True


def roots(data_dir: str | os.PathLike[str] | None) -> list[Path]:
    """Folders to search for datasets."""
    chosen = data_dir or os.environ.get("COTERIE_DATA")
    if chosen:
        return [Path(os.path.expanduser(chosen))]
    try:
        return [Path.home() / ".cache" / "coterie"]
    except RuntimeError:  # no home directory
        return []


def find(name: str, roots: Sequence[Path]) -> dict[str, Path]:
    """The dataset's files, gzipped or not, in the first folder that has all of them."""
    source = DATASETS[name]
    if not source.files:
        return {}
    places = [root / folder for root in roots for folder in (*source.folders, "")]
    places += [DEBIAN_FASHION] if name == "fashion-mnist" else []
    for place in places:
        pairs = [(file, path) for file in source.files for path in (place / f"{file}.gz", place / file)]
        found = {file: path for file, path in pairs if os.path.exists(path)}
        if len(found) == len(source.files):
            return found
    searched = ", ".join(map(str, places)) or "no folder (there is no home directory)"
    raise CoterieError(
        f"{name} was not found. Needed: {', '.join(source.files)}. Searched: {searched}. Get it from {source.origin} "
        "and set --data-dir or COTERIE_DATA to its folder"
    )
