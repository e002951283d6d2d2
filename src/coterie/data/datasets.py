"""Datasets by name, read from local files. Nothing is downloaded here; `coterie data get` does."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from coterie.core.errors import CoterieError, unknown
from coterie.core.names import spelling
from coterie.data import domains, heart, presidents
from coterie.data import image_datasets as images
from coterie.data.dataset import Dataset
from coterie.data.domains import read_digit5, read_domains
from coterie.data.leaf import read_femnist, read_shakespeare
from coterie.data.schools import PUPILS, SCHOOLS, read_schools
from coterie.data.sensors import read_har, read_pamap2
from coterie.data.settings import at_least

SHIPPED = Path(__file__).parent / "shipped"
DEBIAN_FASHION = Path("/usr/share/datasets/fashion-mnist")
INCLUDED = "Coterie: included"
LEAF = "LEAF (leaf.cmu.edu), after its preprocess.sh with -t sample"
UCI_HAR = "UCI (archive.ics.uci.edu/dataset/240)"
HAR = (("UCI HAR Dataset", "uci-har"), ("train", "test", "activity_labels.txt"))
KRIZHEVSKY = "Alex Krizhevsky (cs.toronto.edu/~kriz/cifar.html, 'python version')"


class Source(NamedTuple):
    """A dataset that `load` reads, and where its files are."""

    read: Callable[..., Dataset]  # takes the files, and the size of images if there is a choice
    description: str
    origin: str  # who publishes the files
    folders: tuple[str, ...] = ()  # subfolders to search
    files: tuple[str, ...] = ()  # files or folders that are needed, gzipped or not; empty: included
    side: int | None = None  # pixels to which images are resized, unless --resize says otherwise; None: no choice


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
    "femnist": Source(
        read_femnist,
        "LEAF's FEMNIST: 805,263 grayscale images of 3,550 writers, 62 digits and letters",
        LEAF,
        ("femnist/data", "femnist"),
        ("train", "test"),
    ),
    "shakespeare": Source(
        read_shakespeare,
        "LEAF's Shakespeare: 80 characters of 1,129 roles, and the one that follows",
        LEAF,
        ("shakespeare/data", "shakespeare"),
        ("train", "test"),
    ),
    "uci-har": Source(
        partial(read_har, False), "10,299 windows of 30 subjects, 9 signals x 128 steps, 6 activities", UCI_HAR, *HAR
    ),
    "uci-har-features": Source(partial(read_har, True), "the same windows, 561 features each", UCI_HAR, *HAR),
    "pamap2": Source(
        read_pamap2,
        "windows of 9 subjects, 27 signals x 128 steps, 12 activities",
        "UCI (archive.ics.uci.edu/dataset/231)",
        ("PAMAP2_Dataset", "pamap2"),
        ("Protocol",),
    ),
    "digit5": Source(
        read_digit5,
        "digits of five origins: MNIST, MNIST-M, SVHN, synthetic, USPS",
        "Xingchao Peng (ai.bu.edu/M3SDA)",
        ("Digit-Five", "digit5"),
        tuple(
            f"{n}.mat"
            for n in (
                "mnist_data",
                "mnistm_with_label",
                "svhn_train_32x32",
                "svhn_test_32x32",
                "syn_number",
                "usps_28x28",
            )
        ),
    ),
    "pacs": Source(
        partial(read_domains, "pacs", domains.PACS),
        "9,991 images: photos, art, cartoons, sketches; 7 classes",
        "Da Li (dali-dl.github.io/project_iccv2017.html)",
        ("PACS", "pacs", "PACS/kfold", "kfold"),
        domains.PACS,
        64,
    ),
    "office31": Source(
        partial(read_domains, "office31", domains.OFFICE_31),
        "4,110 images: Amazon, DSLR camera, webcam; 31 classes",
        "Kate Saenko (ai.bu.edu/adaptation.html)",
        ("office31", "Office31", "Office-31"),
        domains.OFFICE_31,
        64,
    ),
    "office-caltech": Source(
        partial(read_domains, "office-caltech", domains.OFFICE_CALTECH),
        "2,533 images: the ten classes of Office-31 that are in Caltech-256, and those",
        "Boqing Gong (github.com/jindongwang/transferlearning)",
        ("office-caltech", "office_caltech_10", "Office-Caltech"),
        domains.OFFICE_CALTECH,
        64,
    ),
    "domainnet": Source(
        partial(read_domains, "domainnet", domains.DOMAINNET),
        "586,575 images of six domains, 345 classes",
        "Xingchao Peng (ai.bu.edu/M3SDA, 'cleaned version')",
        ("DomainNet", "domainnet"),
        (*domains.DOMAINNET, *(f"{d}_{split}.txt" for d in domains.DOMAINNET for split in ("train", "test"))),
        64,
    ),
}


ALIASES = {
    **{spelling(name): name for name in DATASETS},
    "fmnist": "fashion-mnist",
    "fmnistsmall": "fashion-mnist-small",
    "emnistbyclass": "emnist",
    "heart": "heart-disease",
    "sotu": "presidents",
    "hsb": "schools",
}


def known_as(name: str) -> str:
    """The name of a dataset in DATASETS, from any spelling."""
    if spelling(name) not in ALIASES:
        raise unknown("dataset", name, DATASETS)
    return ALIASES[spelling(name)]


def is_known(name: str) -> bool:
    return spelling(name) in ALIASES


def load(name: str, data_dir: str | os.PathLike[str] | None = None, resize: int | None = None) -> Dataset:
    """Load a dataset by name from `data_dir` (default: $COTERIE_DATA, else ~/.cache/coterie).

    resize: pixels of a side, for datasets of images that have different sizes.
    """
    known = known_as(name)
    source = DATASETS[known]
    if source.side is None:
        if resize is not None:
            able = ", ".join(each for each, other in DATASETS.items() if other.side is not None)
            raise CoterieError(f"{known} has samples of one shape; resize is for {able}, and for your own images")
        return source.read(find(known, roots(data_dir)))
    at_least(1, resize=source.side if resize is None else resize)
    return source.read(find(known, roots(data_dir)), source.side if resize is None else resize)


def is_available(name: str, data_dir: str | os.PathLike[str] | None = None) -> bool:
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
        if found := found_in(name, place):
            return found
    searched = ", ".join(map(str, places)) or "no folder (there is no home directory)"
    raise CoterieError(
        f"{name} was not found. Needed: {', '.join(source.files)}. Searched: {searched}. Get it with "
        f"`coterie data get {name}`, or from {source.origin} and set --data-dir or COTERIE_DATA to its folder"
    )


def found_in(name: str, place: Path) -> dict[str, Path]:
    """The dataset's files in a folder; empty unless all of them are there."""
    needed = DATASETS[name].files
    pairs = [(file, path) for file in needed for path in (place / f"{file}.gz", place / file)]
    found = {file: path for file, path in pairs if os.path.exists(path)}
    return found if len(found) == len(needed) else {}
