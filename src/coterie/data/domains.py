"""Images of several domains, each domain one client: PACS, Office and DomainNet as folders, Digit-5 as MATLAB files.

Folders are `domain/class/*.jpg`, or `domain/images/class/*.jpg` as in Office-31. DomainNet's lists of training and test
images are used; elsewhere every fourth image of each class, in file order, is for testing. Images are resized to one
size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from coterie.core.data import Transform
from coterie.core.errors import CoterieError
from coterie.data.dataset import Dataset, Files, natural_dataset
from coterie.data.held_out import every_fourth
from coterie.data.image_datasets import DIGITS
from coterie.data.pixels import read_rgb

PACS = ("art_painting", "cartoon", "photo", "sketch")
OFFICE_31 = ("amazon", "dslr", "webcam")
OFFICE_CALTECH = ("amazon", "caltech", "dslr", "webcam")
DOMAINNET = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
DIGIT_5 = ("mnist", "mnist-m", "svhn", "synthetic", "usps")
ENDINGS = (".jpg", ".jpeg", ".png")
HALF = Transform((0.5,) * 3, (0.5,) * 3)

Bytes = NDArray[np.uint8]
Listed = tuple[Path, int, bool]  # image, class, whether it is for testing


def read_domains(name: str, domains: tuple[str, ...], files: Files, side: int) -> Dataset:
    """side: pixels of the images that are returned."""
    folders = {domain: inner(files[domain]) for domain in domains}
    classes = class_names(folders)
    if f"{domains[0]}_train.txt" in files:
        parts = [listed(files, domain, classes) for domain in domains]
    else:
        parts = [found(folder, classes) for folder in folders.values()]
    images = [image for part in parts for image in part]
    x = np.empty((len(images), 3, side, side), np.uint8)
    for at, (path, _, _) in enumerate(images):
        x[at] = read_rgb(path, side)
    y = np.array([label for _, label, _ in images], np.int64)
    test = np.array([held for _, _, held in images], bool)
    owner = np.repeat(np.arange(len(domains)), [len(part) for part in parts])
    record = {"reading": [f"images resized and cropped to {side} x {side} pixels"]}
    return natural_dataset(name, (x, y), owner, test, classes, transform=HALF, client_names=domains, record=record)


def inner(folder: Path) -> Path:
    """The folder with the class folders."""
    return folder / "images" if (folder / "images").is_dir() else folder


def folders_in(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    except OSError as error:
        raise CoterieError(f"{folder}: cannot be read as a folder of classes ({error.strerror})") from None


def class_names(folders: dict[str, Path]) -> tuple[str, ...]:
    """The class folders, the same in every domain."""
    own = {domain: folders_in(folder) for domain, folder in folders.items()}
    known = sorted(set().union(*own.values()))
    for domain, names in own.items():
        if missing := [name for name in known if name not in names]:
            raise CoterieError(f"{folders[domain]}: class folder '{missing[0]}' is missing, other domains have it")
    if not known:
        raise CoterieError(f"{next(iter(folders.values()))}: no class folders")
    return tuple(known)


def found(folder: Path, classes: tuple[str, ...]) -> list[Listed]:
    """The images in the class folders of a domain."""
    images = []
    for label, name in enumerate(classes):
        paths = sorted(path for path in (folder / name).iterdir() if path.suffix.lower() in ENDINGS)
        if not paths:
            raise CoterieError(f"{folder / name}: no images ({', '.join(ENDINGS)})")
        held = every_fourth(np.zeros(len(paths), np.int64))
        images += [(path, label, bool(test)) for path, test in zip(paths, held, strict=True)]
    return images


def listed(files: Files, domain: str, classes: tuple[str, ...]) -> list[Listed]:
    """The images in DomainNet's lists, whose lines are `clipart/zebra/clipart_345_000001.jpg 344`."""
    images = []
    for split in ("train", "test"):
        path = files[f"{domain}_{split}.txt"]
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise CoterieError(f"{path}: cannot be read as a list of images ({error})") from error
        for number, line in enumerate(lines, 1):
            place, _, _ = line.rpartition(" ")
            parts = place.split("/")
            if len(parts) != 3 or parts[0] != domain or parts[1] not in classes or ".." in parts:
                raise CoterieError(f"{path}, line {number}: expected '{domain}/CLASS/FILE NUMBER', got {line[:60]!r}")
            images.append((files[domain].parent / place, classes.index(parts[1]), split == "test"))
    return images


def read_digit5(files: Files) -> Dataset:
    """Digits of five origins as images of 3 x 32 x 32."""
    parts = []
    for domain, read in enumerate((mnist, mnist_m, svhn, synthetic, usps)):
        for held, (x, y) in zip((False, True), read(files), strict=True):
            if x.shape[2:] != (32, 32):
                x = F.interpolate(torch.from_numpy(x).float(), (32, 32), mode="bilinear").round().byte().numpy()
            parts.append((np.broadcast_to(x, (len(x), 3, 32, 32)), y, np.full(len(y), domain), np.full(len(y), held)))
    x, y, owner, test = (np.concatenate(values) for values in zip(*parts, strict=True))
    return natural_dataset("digit5", (x, y), owner, test, DIGITS, transform=HALF, client_names=DIGIT_5)


Split = tuple[Bytes, NDArray[np.int64]]


def mnist(files: Files) -> list[Split]:
    path = files["mnist_data.mat"]
    content = matlab(path, "train_32", "test_32", "label_train", "label_test")
    return [
        digits(path, content[f"{split}_32"][:, None], one_hot(path, content[f"label_{split}"]))
        for split in ("train", "test")
    ]


def mnist_m(files: Files) -> list[Split]:
    path = files["mnistm_with_label.mat"]
    content = matlab(path, "train", "test", "label_train", "label_test")
    return [
        digits(path, channels_first(content[split]), one_hot(path, content[f"label_{split}"]))
        for split in ("train", "test")
    ]


def svhn(files: Files) -> list[Split]:
    splits = []
    for path in (files["svhn_train_32x32.mat"], files["svhn_test_32x32.mat"]):
        content = matlab(path, "X", "y")  # (32, 32, 3, n), and labels 1 to 10, where 10 means 0
        splits.append(digits(path, content["X"].transpose(3, 2, 0, 1), content["y"].reshape(-1) % 10))
    return splits


def synthetic(files: Files) -> list[Split]:
    path = files["syn_number.mat"]
    content = matlab(path, "train_data", "test_data", "train_label", "test_label")
    return [
        digits(path, channels_first(content[f"{split}_data"]), content[f"{split}_label"].reshape(-1))
        for split in ("train", "test")
    ]


def usps(files: Files) -> list[Split]:
    path = files["usps_28x28.mat"]
    table = matlab(path, "dataset")["dataset"]  # (2, 2) objects: images (n, 1, 28, 28) in 0..1, labels (n, 1)
    if table.shape != (2, 2):
        raise CoterieError(f"{path}: 'dataset' has shape {table.shape}, expected (2, 2)")
    return [digits(path, np.round(255 * row[0]), row[1].reshape(-1)) for row in table]


def matlab(path: Path, *needed: str) -> dict[str, NDArray[Any]]:
    try:
        from scipy.io import loadmat
    except ImportError:
        raise CoterieError("reading Digit-5 needs SciPy: pip install 'coterie[matlab]'") from None
    try:
        content: dict[str, NDArray[Any]] = loadmat(path)
    except Exception as error:  # a damaged file can raise anything
        raise CoterieError(f"{path}: cannot be read as a MATLAB file ({error})") from error
    for name in needed:
        if name not in content:
            raise CoterieError(f"{path}: no array '{name}'")
    return content


def channels_first(x: NDArray[Any]) -> NDArray[Any]:
    return x.transpose(0, 3, 1, 2) if x.ndim == 4 else x


def one_hot(path: Path, labels: NDArray[Any]) -> NDArray[np.int64]:
    if labels.ndim != 2 or labels.shape[1] != 10 or not ((labels != 0).sum(1) == 1).all():
        raise CoterieError(f"{path}: labels of shape {labels.shape} are not one-hot with 10 columns")
    return np.nonzero(labels)[1]


def digits(path: Path, x: NDArray[Any], y: NDArray[Any]) -> Split:
    if x.ndim != 4 or x.shape[1] not in (1, 3) or len(x) != len(y):
        raise CoterieError(f"{path}: images of shape {x.shape} do not match {len(y)} labels")
    if x.size and not 0 <= x.min() <= x.max() <= 255:
        raise CoterieError(f"{path}: pixels from {x.min()} to {x.max()}, expected 0 to 255")
    return x.astype(np.uint8), y.astype(np.int64)
