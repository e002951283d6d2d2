"""Where datasets are published: addresses, checksums, licenses and citations, for `coterie data get`."""

from __future__ import annotations

from typing import NamedTuple


class RemoteFile(NamedTuple):
    url: str
    checksum: str = ""  # such as md5:58c8...; empty: the publisher gives none


class Publication(NamedTuple):
    """How to get a dataset. Without files, its publisher offers no download for programs; `--from` takes an archive."""

    license: str
    citation: str
    files: tuple[RemoteFile, ...] = ()
    manual: str = ""  # what to do instead of an automatic download


def idx(base: str, checksums: tuple[str, str, str, str]) -> tuple[RemoteFile, ...]:
    names = (f"{split}-{kind}-ubyte.gz" for split in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
    return tuple(RemoteFile(base + name, f"md5:{checksum}") for name, checksum in zip(names, checksums, strict=True))


NOT_STATED = "not stated by the publisher"
OFFICE = "Saenko, Kulis, Fritz, Darrell: Adapting Visual Category Models to New Domains, ECCV 2010"
PENG = "Peng, Bai, Xia, Huang, Saenko, Wang: Moment Matching for Multi-Source Domain Adaptation, ICCV 2019"
CALDAS = "Caldas et al.: LEAF: A Benchmark for Federated Settings, 2018"
KRIZHEVSKY = "Krizhevsky: Learning Multiple Layers of Features from Tiny Images, 2009"
BY_HAND = "download it from the publisher's page, then pass the archive or its folder"
UCI_HAR = Publication(
    "CC BY 4.0",
    "Anguita, Ghio, Oneto, Parra, Reyes-Ortiz: A Public Domain Dataset for Human Activity Recognition Using "
    "Smartphones, ESANN 2013; https://doi.org/10.24432/C54S4K",
    (
        RemoteFile(
            "https://archive.ics.uci.edu/static/public/240/human+activity+recognition+using+smartphones.zip",
            "sha256:c00b803081a5c797cd5e4b83700a9810b38d53d9d84e01917e090e1fdbc81031",
        ),
    ),
)

PUBLICATIONS: dict[str, Publication] = {
    "mnist": Publication(
        "CC BY-SA 3.0",
        "LeCun, Bottou, Bengio, Haffner: Gradient-Based Learning Applied to Document Recognition, 1998",
        idx(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            (
                "f68b3c2dcbeaaa9fbdd348bbdeb94873",
                "d53e105ee54ea40749a09fcbcd1e9432",
                "9fb629c4189551a2d022fa330f9573f3",
                "ec29112dd5afa0611ce80d1b7f02629c",
            ),
        ),
    ),
    "fashion-mnist": Publication(
        "MIT",
        "Xiao, Rasul, Vollgraf: Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning, 2017",
        idx(
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            (
                "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                "25c81989df183df01b3e8a0aad5dffbe",
                "bef4ecab320f06d8554ea6380940ec79",
                "bb300cfdad3c16e7a12a480ee83cd310",
            ),
        ),
    ),
    "emnist": Publication(
        NOT_STATED,
        "Cohen, Afshar, Tapson, van Schaik: EMNIST: an Extension of MNIST to Handwritten Letters, 2017",
        (RemoteFile("https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip", "md5:58c8d27c78d21e728a6bc7b3cc06412e"),),
    ),
    "cifar10": Publication(
        NOT_STATED,
        KRIZHEVSKY,
        (
            RemoteFile(
                "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz", "md5:c58f30108f718f92721af3b95e74349a"
            ),
        ),
    ),
    "cifar100": Publication(
        NOT_STATED,
        KRIZHEVSKY,
        (
            RemoteFile(
                "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz", "md5:eb9058c3a382ffc7106e4002c42a8d85"
            ),
        ),
    ),
    "cinic10": Publication(
        "see the publisher's page; its ImageNet part is for non-commercial research",
        "Darlow, Crowley, Antoniou, Storkey: CINIC-10 Is Not ImageNet or CIFAR-10, 2018",
        (
            RemoteFile(
                "https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz",
                "md5:6ee4d0c996905fe93221de577967a372",
            ),
        ),
    ),
    "uci-har": UCI_HAR,
    "uci-har-features": UCI_HAR,
    "pamap2": Publication(
        "CC BY 4.0",
        "Reiss, Stricker: Introducing a New Benchmarked Dataset for Activity Monitoring, ISWC 2012; "
        "https://doi.org/10.24432/C5NW2H",
        (RemoteFile("https://archive.ics.uci.edu/static/public/231/pamap2+physical+activity+monitoring.zip"),),
    ),
    "schools": Publication(
        "GPL (R's package nlme); terms of the extract itself: not stated",
        "Bryk, Raudenbush: Hierarchical Linear Models, 1992; High School and Beyond, 1982",
        (
            RemoteFile("https://vincentarelbundock.github.io/Rdatasets/csv/nlme/MathAchieve.csv"),
            RemoteFile("https://vincentarelbundock.github.io/Rdatasets/csv/nlme/MathAchSchool.csv"),
        ),
    ),
    "femnist": Publication(
        "LEAF: BSD 2-Clause; images of NIST Special Database 19",
        CALDAS,
        manual="run LEAF's data/femnist/preprocess.sh -s niid --sf 1.0 -k 0 -t sample, then pass its data folder",
    ),
    "shakespeare": Publication(
        "LEAF: BSD 2-Clause; the text is in the public domain",
        CALDAS,
        manual="run LEAF's data/shakespeare/preprocess.sh -s niid --sf 1.0 -k 0 -t sample, then pass its data folder",
    ),
    "pacs": Publication(
        NOT_STATED,
        "Li, Yang, Song, Hospedales: Deeper, Broader and Artier Domain Generalization, ICCV 2017",
        manual=BY_HAND,
    ),
    "office31": Publication(NOT_STATED, OFFICE, manual=BY_HAND),
    "office-caltech": Publication(
        NOT_STATED,
        "Gong, Shi, Sha, Grauman: Geodesic Flow Kernel for Unsupervised Domain Adaptation, CVPR 2012",
        manual=BY_HAND,
    ),
    "digit5": Publication(NOT_STATED, PENG, manual=BY_HAND),
    "domainnet": Publication("for research, under the publisher's fair use notice", PENG, manual=BY_HAND),
}
