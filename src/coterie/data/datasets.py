"""Datasets by name, read from local files. Nothing is downloaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.core.data import Transform
from coterie.core.errors import CoterieError, unknown
from coterie.data.formats import read_cifar, read_idx, read_image_folders, read_pickle
from coterie.data.heart import read_heart
from coterie.data.packed import unpack
from coterie.data.partition import Labels
from coterie.data.transforms import transform

Arrays = tuple[NDArray[Any], NDArray[Any]]  # samples, labels

SHIPPED = Path(__file__).parent / "shipped"
DEBIAN_FASHION = Path("/usr/share/datasets/fashion-mnist")

DIGITS = tuple("0123456789")
LETTERS = tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
GARMENTS = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def _idx_files(prefix: str = "", test: str = "t10k") -> tuple[str, ...]:
    kinds = ("images-idx3-ubyte", "labels-idx1-ubyte")
    return tuple(f"{prefix}{split}-{kind}" for split in ("train", test) for kind in kinds)


FILES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # subfolders to search, file names
    "mnist": (("MNIST/raw",), _idx_files()),
    "fashion-mnist": (("FashionMNIST/raw",), _idx_files()),
    "emnist": (("EMNIST/raw", "gzip"), _idx_files("emnist-byclass-", "test")),
    "cifar10": (("cifar-10-batches-py",), (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")),
    "cifar100": (("cifar-100-python",), ("train", "test", "meta")),
    "cinic10": (("CINIC-10", "cinic-10", "cinic10"), ("train", "test")),
}

FIRST_LABELS = {  # of the training split, to tell the two apart: their files have the same names
    "mnist": [5, 0, 4, 1, 9, 2, 1, 3, 1, 4, 3, 5],
    "fashion-mnist": [9, 0, 0, 3, 0, 2, 7, 2, 5, 5, 0, 9],
}


@dataclass(frozen=True)
class Dataset:
    """The official train and test split of a dataset, as raw samples."""

    name: str
    x_train: Tensor  # (N, C, H, W) uint8, or (N, F) float32
    y_train: Tensor  # (N,) int64
    x_test: Tensor
    y_test: Tensor
    classes: tuple[str, ...]  # class names
    transform: Transform = field(default_factory=Transform)
    owners: tuple[Tensor, Tensor] | None = None  # (N,) int64: client of each train and test sample
    groups: tuple[Tensor, Tensor] | None = None  # (N,) int64: group of each train and test sample; never split
    client_names: tuple[str, ...] = ()  # names of the owners
    record: dict[str, Any] = field(default_factory=dict)  # added to the settings of every partition

    def __post_init__(self) -> None:
        for split, x, y in (("train", self.x_train, self.y_train), ("test", self.x_test, self.y_test)):
            if len(x) != len(y):
                raise CoterieError(f"{self.name}: {len(x)} {split} samples but {len(y)} {split} labels")
            if len(y) and not 0 <= int(y.min()) <= int(y.max()) < len(self.classes):
                raise CoterieError(
                    f"{self.name}: {split} labels from {int(y.min())} to {int(y.max())}, "
                    f"but there are {len(self.classes)} classes"
                )

    @property
    def labels(self) -> Labels:
        """The input of a partition rule."""
        owners = self.owners and (self.owners[0].numpy(), self.owners[1].numpy())
        return Labels(self.name, self.y_train.numpy(), self.y_test.numpy(), self.classes, owners)


class Source(NamedTuple):
    read: Callable[[Sequence[Path]], Dataset]  # takes the folders to search
    description: str
    origin: str  # who publishes the files


def load(name: str, data_dir: str | os.PathLike[str] | None = None) -> Dataset:
    """Load a dataset by name from `data_dir` (default: $COTERIE_DATA, else ~/.cache/coterie)."""
    known = ALIASES.get(_plain(name))
    if known is None:
        raise unknown("dataset", name, DATASETS)
    return DATASETS[known].read(_roots(data_dir))


def is_known(name: str) -> bool:
    return _plain(name) in ALIASES


def at_hand(name: str, data_dir: str | os.PathLike[str] | None = None) -> bool:
    """Whether `load` would find the dataset's files. Does not read them."""
    try:
        return name not in FILES or bool(_find(name, _roots(data_dir)))
    except CoterieError:
        return False


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _roots(data_dir: str | os.PathLike[str] | None) -> list[Path]:
    chosen = data_dir or os.environ.get("COTERIE_DATA")
    if chosen:
        return [Path(os.path.expanduser(chosen))]
    try:
        return [Path.home() / ".cache" / "coterie"]
    except RuntimeError:  # no home directory
        return []


def _find(name: str, roots: Sequence[Path]) -> dict[str, Path]:
    """The dataset's files, gzipped or not, in the first folder that has all of them."""
    folders, files = FILES[name]
    places = [root / folder for root in roots for folder in (*folders, "")]
    places += [DEBIAN_FASHION] if name == "fashion-mnist" else []
    for place in places:
        found = {file: path for file in files for path in (place / f"{file}.gz", place / file) if os.path.exists(path)}
        if len(found) == len(files):
            return found
    searched = ", ".join(map(str, places)) or "no folder (there is no home directory)"
    raise CoterieError(
        f"{name} was not found. Needed: {', '.join(files)}. Searched: {searched}. Get it from {DATASETS[name].origin} "
        "and set --data-dir or COTERIE_DATA to its folder"
    )


def _dataset(name: str, train: Arrays, test: Arrays, classes: tuple[str, ...], **more: Any) -> Dataset:
    x_train, x_test = (torch.from_numpy(np.require(x, requirements=["C", "W"])) for x in (train[0], test[0]))
    y_train, y_test = (torch.from_numpy(y.astype(np.int64)) for y in (train[1], test[1]))
    return Dataset(name, x_train, y_train, x_test, y_test, classes, transform(name), **more)


def _read_idx_pair(images: Path, labels: Path) -> Arrays:
    x, y = read_idx(images), read_idx(labels)
    if x.ndim != 3 or y.ndim != 1 or len(x) != len(y):
        raise CoterieError(f"{images}: images of shape {x.shape} do not match labels of shape {y.shape}")
    return x[:, None], y


def _mnist_family(name: str, classes: tuple[str, ...], roots: Sequence[Path]) -> Dataset:
    files = list(_find(name, roots).values())
    splits = [_read_idx_pair(files[i], files[i + 1]) for i in (0, 2)]
    for other, first in FIRST_LABELS.items():
        if other != name and splits[0][1][: len(first)].tolist() == first:
            raise CoterieError(f"{files[0].parent}: these files are {other}, not {name}")
    return _dataset(name, splits[0], splits[1], classes)


def _read_emnist(roots: Sequence[Path]) -> Dataset:
    stored = _mnist_family("emnist", DIGITS + LETTERS, roots)  # stored transposed
    return replace(stored, x_train=stored.x_train.mT.contiguous(), x_test=stored.x_test.mT.contiguous())


def _read_cifar10(roots: Sequence[Path]) -> Dataset:
    batches = [read_cifar(path, b"labels") for path in _find("cifar10", roots).values()]
    x, y = (np.concatenate(parts) for parts in zip(*batches[:5], strict=True))
    return _dataset("cifar10", (x, y), batches[5], CIFAR10)


def _read_cifar100(roots: Sequence[Path]) -> Dataset:
    found = _find("cifar100", roots)
    names = read_pickle(found["meta"]).get(b"fine_label_names")
    if not isinstance(names, list):
        raise CoterieError(f"{found['meta']}: class names are missing")
    classes = tuple(name.decode() if isinstance(name, bytes) else str(name) for name in names)
    splits = [read_cifar(found[split], b"fine_labels") for split in ("train", "test")]
    return _dataset("cifar100", splits[0], splits[1], classes)


def _read_cinic10(roots: Sequence[Path]) -> Dataset:
    found = _find("cinic10", roots)
    (*train, classes), (*test, others) = (read_image_folders(found[split], 32) for split in ("train", "test"))
    if classes != others:
        raise CoterieError(f"{found['test']}: its class folders differ from those in {found['train']}")
    return _dataset("cinic10", (train[0], train[1]), (test[0], test[1]), classes)


def _read_small(roots: Sequence[Path]) -> Dataset:
    splits = [unpack(SHIPPED / f"fashion_mnist_small_{split}.xz") for split in ("train", "test")]
    (x, y), (x_test, y_test) = splits
    return _dataset("fashion-mnist-small", (x[:, None], y), (x_test[:, None], y_test), GARMENTS)


def _read_heart(roots: Sequence[Path]) -> Dataset:
    x, y, hospital, test, names, transform = read_heart(SHIPPED / "heart_disease.npz")
    owners = (torch.from_numpy(hospital[~test]), torch.from_numpy(hospital[test]))
    made = _dataset("heart-disease", (x[~test], y[~test]), (x[test], y[test]), ("healthy", "disease"), owners=owners)
    return replace(made, client_names=names, transform=transform)


DATASETS: dict[str, Source] = {
    "fashion-mnist-small": Source(
        _read_small, "9,000 + 2,250 grayscale images of Fashion-MNIST, 10 garments", "Coterie: included"
    ),
    "heart-disease": Source(_read_heart, "920 patients of four hospitals, heart disease or none", "Coterie: included"),
    "fashion-mnist": Source(
        partial(_mnist_family, "fashion-mnist", GARMENTS),
        "60,000 + 10,000 grayscale images, 10 garments",
        "Zalando Research (github.com/zalandoresearch/fashion-mnist) or Debian's package dataset-fashion-mnist",
    ),
    "mnist": Source(
        partial(_mnist_family, "mnist", DIGITS),
        "60,000 + 10,000 grayscale images, 10 digits",
        "Yann LeCun and Corinna Cortes (yann.lecun.com/exdb/mnist)",
    ),
    "emnist": Source(
        _read_emnist,
        "EMNIST ByClass: 697,932 + 116,323 grayscale images, 62 digits and letters",
        "NIST (nist.gov/itl/products-and-services/emnist-dataset)",
    ),
    "cifar10": Source(
        _read_cifar10,
        "50,000 + 10,000 color images, 10 classes",
        "Alex Krizhevsky (cs.toronto.edu/~kriz/cifar.html, 'python version')",
    ),
    "cifar100": Source(
        _read_cifar100,
        "50,000 + 10,000 color images, 100 classes",
        "Alex Krizhevsky (cs.toronto.edu/~kriz/cifar.html, 'python version')",
    ),
    "cinic10": Source(
        _read_cinic10,
        "90,000 + 90,000 color images, 10 classes (its train and test folders)",
        "the University of Edinburgh (datashare.ed.ac.uk/handle/10283/3192)",
    ),
}
ALIASES = {
    **{_plain(name): name for name in DATASETS},
    "fmnist": "fashion-mnist",
    "fmnistsmall": "fashion-mnist-small",
    "emnistbyclass": "emnist",
    "heart": "heart-disease",
}
