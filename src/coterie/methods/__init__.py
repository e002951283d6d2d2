"""The papers. One file each; nothing elsewhere is about one method only."""

from __future__ import annotations

from typing import Any

from coterie.core.method import Method
from coterie.methods.apfl import APFL
from coterie.methods.ditto import Ditto
from coterie.methods.fedavg import FedAvg
from coterie.methods.fedbabu import FedBABU
from coterie.methods.fedcrc import FedCRC
from coterie.methods.feddyn import FedDyn
from coterie.methods.fedem import FedEM
from coterie.methods.fedfomo import FedFomo
from coterie.methods.fedpac import FedPAC
from coterie.methods.fedpac_proto import FedPACProto
from coterie.methods.fedper import FedPer
from coterie.methods.fedproto import FedProto
from coterie.methods.fedprox import FedProx
from coterie.methods.fedreg import FedReG
from coterie.methods.fedrep import FedRep
from coterie.methods.fedrod import FedRoD
from coterie.methods.gpfl import GPFL
from coterie.methods.hypcluster import HypCluster
from coterie.methods.knn_per import KNNPer
from coterie.methods.lg_fedavg import LGFedAvg
from coterie.methods.local import Local
from coterie.methods.pfakd import PFAKD
from coterie.methods.pfedhn import pFedHN
from coterie.methods.pfedme import pFedMe
from coterie.methods.scaffold import SCAFFOLD

AnyMethod = Method[Any, Any, Any, Any]

METHODS: dict[str, type[AnyMethod]] = {
    "local": Local,
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "scaffold": SCAFFOLD,
    "feddyn": FedDyn,
    "fedper": FedPer,
    "fedrep": FedRep,
    "lg-fedavg": LGFedAvg,
    "fedbabu": FedBABU,
    "fedrod": FedRoD,
    "knn-per": KNNPer,
    "apfl": APFL,
    "pfedme": pFedMe,
    "ditto": Ditto,
    "fedfomo": FedFomo,
    "pfedhn": pFedHN,
    "hypcluster": HypCluster,
    "fedem": FedEM,
    "fedproto": FedProto,
    "gpfl": GPFL,
    "fedpac": FedPAC,
    "fedpac-proto": FedPACProto,
    "fedreg": FedReG,
    "fedcrc": FedCRC,
    "pfakd": PFAKD,
}

# Names for settings that the papers give a name: its method, what differs, and its title.
VARIANTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "fedavg-ft": ("fedavg", {}, "FedAvg-FT"),
    "hypcluster-3": ("hypcluster", {"clusters": 3}, "HypCluster (k=3)"),
    "hypcluster-5": ("hypcluster", {"clusters": 5}, "HypCluster (k=5)"),
    "fedem-ft": ("fedem", {}, "FedEM-FT"),
    "fedem-5": ("fedem", {"components": 5}, "FedEM (M=5)"),
    "fedproto-g": ("fedproto", {"prototypes": "global"}, "FedProto-G"),
    "fedproto-l": ("fedproto", {"prototypes": "local"}, "FedProto-L"),
    "fedpac-none": ("fedpac", {"align": 0.0, "combine": False}, "FedPAC (none)"),
    "fedpac-fa": ("fedpac", {"combine": False}, "FedPAC (alignment only)"),
    "fedpac-cc": ("fedpac", {"align": 0.0}, "FedPAC (combination only)"),
    "fedpac-shift": ("fedpac", {"personal_prototypes": True}, "FedPAC (personal prototypes)"),
    "fedreg-a": ("fedreg", {"head_by": "samples"}, "FedReG (a)"),
    "fedreg-b": ("fedreg", {"two_heads": False}, "FedReG (b)"),
    "fedreg-c": ("fedreg", {"rebalance": False}, "FedReG (c)"),
    "fedreg-d": ("fedreg", {"original_pass": False}, "FedReG (d)"),
    "fedcrc-per": ("fedcrc", {}, "FedCRC-Per"),
    "pfakd-at": ("pfakd", {"at": "alternate"}, "PFAKD+AT (alternating, our reading)"),
}


def parts(name: str) -> tuple[str, dict[str, Any]]:
    """The method that a method or variant is, and the settings that make it the variant."""
    base, changes, _ = VARIANTS.get(name, (name, {}, ""))
    return base, changes


def training(name: str) -> str:
    """The method or variant that trains for this one: several can be results of one training."""
    base, changes = parts(name)
    return name if changes else base
