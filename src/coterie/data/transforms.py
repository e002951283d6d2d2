"""The preprocessing of each dataset in each paper."""

from __future__ import annotations

from coterie.core.data import Transform
from coterie.core.errors import unknown

GREY = Transform((0.1307,), (0.3081,))
HALF = 0.5
TRANSFORMS: dict[str, dict[str, Transform]] = {  # protocol -> dataset
    "pac": {
        "mnist": GREY,
        "fashion-mnist": GREY,
        "fashion-mnist-small": GREY,
        "emnist": GREY,
        "cifar10": Transform((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010), crop=4, flip=True),
        "cinic10": Transform(
            (0.47889522, 0.47227842, 0.43047404), (0.24205776, 0.23828046, 0.25874835), crop=4, flip=True
        ),
        "cifar100": Transform((0.507, 0.487, 0.441), (0.267, 0.256, 0.276), crop=4, flip=True),
        "heart-disease": Transform(),
    },
}
TRANSFORMS["crc"] = {
    **TRANSFORMS["pac"],
    "cifar10": Transform((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), crop=4, flip=True),
}
TRANSFORMS["quick"] = TRANSFORMS["pac"]
TRANSFORMS["reg"] = TRANSFORMS["akd"] = {
    name: Transform((HALF,) * len(pac.mean), (HALF,) * len(pac.std)) for name, pac in TRANSFORMS["pac"].items()
}


def transform(dataset: str, protocol: str = "pac") -> Transform:
    """The preprocessing of a dataset in a protocol: pac, reg, crc, akd or quick."""
    if protocol not in TRANSFORMS:
        raise unknown("protocol", protocol, TRANSFORMS)
    if dataset not in TRANSFORMS[protocol]:
        raise unknown("dataset", dataset, TRANSFORMS[protocol])
    return TRANSFORMS[protocol][dataset]
