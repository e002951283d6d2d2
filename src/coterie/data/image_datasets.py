"""Readers of image datasets for classification, from the files of their publishers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from coterie.core.errors import CoterieError
from coterie.data.dataset import Arrays, Dataset, Files, dataset_of
from coterie.data.formats import read_cifar, read_idx, read_image_folders, read_pickle
from coterie.data.packed import unpack
from coterie.data.transforms import transform

DIGITS = tuple("0123456789")
LETTERS = tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
GARMENTS = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

FIRST_LABELS = {  # of the training split, to tell the two apart: their files have the same names
    "mnist": [5, 0, 4, 1, 9, 2, 1, 3, 1, 4, 3, 5],
    "fashion-mnist": [9, 0, 0, 3, 0, 2, 7, 2, 5, 5, 0, 9],
}


def idx_files(prefix: str = "", test: str = "t10k") -> tuple[str, ...]:
    kinds = ("images-idx3-ubyte", "labels-idx1-ubyte")
    return tuple(f"{prefix}{split}-{kind}" for split in ("train", test) for kind in kinds)


def images_of(name: str, train: Arrays, test: Arrays, classes: tuple[str, ...]) -> Dataset:
    return dataset_of(name, train, test, classes, transform=transform(name))


def read_idx_pair(images: Path, labels: Path) -> Arrays:
    x, y = read_idx(images), read_idx(labels)
    if x.ndim != 3 or y.ndim != 1 or len(x) != len(y):
        raise CoterieError(f"{images}: images of shape {x.shape} do not match labels of shape {y.shape}")
    return x[:, None], y


def read_mnist_family(name: str, classes: tuple[str, ...], files: Files) -> Dataset:
    paths = list(files.values())
    splits = [read_idx_pair(paths[i], paths[i + 1]) for i in (0, 2)]
    for other, first in FIRST_LABELS.items():
        if other != name and splits[0][1][: len(first)].tolist() == first:
            raise CoterieError(f"{paths[0].parent}: these files are {other}, not {name}")
    return images_of(name, splits[0], splits[1], classes)


def read_emnist(files: Files) -> Dataset:
    stored = read_mnist_family("emnist", DIGITS + LETTERS, files)  # stored transposed
    return replace(stored, x_train=stored.x_train.mT.contiguous(), x_test=stored.x_test.mT.contiguous())


def read_cifar10(files: Files) -> Dataset:
    batches = [read_cifar(path, b"labels") for path in files.values()]
    x, y = (np.concatenate(parts) for parts in zip(*batches[:5], strict=True))
    return images_of("cifar10", (x, y), batches[5], CIFAR10)


def read_cifar100(files: Files) -> Dataset:
    names = read_pickle(files["meta"]).get(b"fine_label_names")
    if not isinstance(names, list):
        raise CoterieError(f"{files['meta']}: class names are missing")
    classes = tuple(name.decode() if isinstance(name, bytes) else str(name) for name in names)
    splits = [read_cifar(files[split], b"fine_labels") for split in ("train", "test")]
    return images_of("cifar100", splits[0], splits[1], classes)


def read_cinic10(files: Files) -> Dataset:
    (*train, classes), (*test, others) = (read_image_folders(files[split], 32) for split in ("train", "test"))
    if classes != others:
        raise CoterieError(f"{files['test']}: its class folders differ from those in {files['train']}")
    return images_of("cinic10", (train[0], train[1]), (test[0], test[1]), classes)


def read_small(folder: Path, files: Files) -> Dataset:
    """folder: of the included files."""
    splits = [unpack(folder / f"fashion_mnist_small_{split}.xz") for split in ("train", "test")]
    (x, y), (x_test, y_test) = splits
    return images_of("fashion-mnist-small", (x[:, None], y), (x_test[:, None], y_test), GARMENTS)
