"""The methods: one file or folder per paper."""

from __future__ import annotations

import inspect
import sys
from dataclasses import fields
from typing import Any

from coterie.core.method import AnyMethod
from coterie.methods.afl import AFL
from coterie.methods.apfl import APFL
from coterie.methods.apple import APPLE
from coterie.methods.cfl import CFL
from coterie.methods.ditto import Ditto
from coterie.methods.fedala import FedALA
from coterie.methods.fedalt import FedAlt
from coterie.methods.fedamp import FedAMP
from coterie.methods.fedas import FedAS
from coterie.methods.fedavg import FedAvg
from coterie.methods.fedavgm import FedAvgM
from coterie.methods.fedbabu import FedBABU
from coterie.methods.fedbn import FedBN
from coterie.methods.fedcac import FedCAC
from coterie.methods.fedcp import FedCP
from coterie.methods.fedcrc import FedCRC
from coterie.methods.feddbe import FedDBE
from coterie.methods.feddyn import FedDyn
from coterie.methods.fedem import FedEM
from coterie.methods.fedfomo import FedFomo
from coterie.methods.fedgen import FedGen
from coterie.methods.fedgh import FedGH
from coterie.methods.fedlc import FedLC
from coterie.methods.fednova import FedNova
from coterie.methods.fedntd import FedNTD
from coterie.methods.fedopt import FedOpt
from coterie.methods.fedpac import FedPAC
from coterie.methods.fedpac_proto import FedPACProto
from coterie.methods.fedper import FedPer
from coterie.methods.fedphp import FedPHP
from coterie.methods.fedproto import FedProto
from coterie.methods.fedprox import FedProx
from coterie.methods.fedreg import FedReG
from coterie.methods.fedrep import FedRep
from coterie.methods.fedrod import FedRoD
from coterie.methods.fedsam import FedSAM
from coterie.methods.fedsim import FedSim
from coterie.methods.fedtgp import FedTGP
from coterie.methods.floco import Floco
from coterie.methods.fml import FML
from coterie.methods.gpfl import GPFL
from coterie.methods.hypcluster import HypCluster
from coterie.methods.knn_per import KNNPer
from coterie.methods.lg_fedavg import LGFedAvg
from coterie.methods.local import Local
from coterie.methods.moon import MOON
from coterie.methods.mr_mtl import MRMTL
from coterie.methods.per_fedavg import PerFedAvg
from coterie.methods.pfakd import PFAKD
from coterie.methods.pfedfda import pFedFDA
from coterie.methods.pfedhn import pFedHN
from coterie.methods.pfedla import pFedLA
from coterie.methods.pfedme import pFedMe
from coterie.methods.q_fedavg import qFedAvg
from coterie.methods.scaffold import SCAFFOLD
from coterie.methods.superfed import SuPerFed

__all__ = [
    "AFL",
    "APFL",
    "APPLE",
    "CFL",
    "FML",
    "GPFL",
    "METHODS",
    "MOON",
    "MRMTL",
    "PFAKD",
    "SCAFFOLD",
    "VARIANTS",
    "Ditto",
    "FedALA",
    "FedAMP",
    "FedAS",
    "FedAlt",
    "FedAvg",
    "FedAvgM",
    "FedBABU",
    "FedBN",
    "FedCAC",
    "FedCP",
    "FedCRC",
    "FedDBE",
    "FedDyn",
    "FedEM",
    "FedFomo",
    "FedGH",
    "FedGen",
    "FedLC",
    "FedNTD",
    "FedNova",
    "FedOpt",
    "FedPAC",
    "FedPACProto",
    "FedPHP",
    "FedPer",
    "FedProto",
    "FedProx",
    "FedReG",
    "FedRep",
    "FedRoD",
    "FedSAM",
    "FedSim",
    "FedTGP",
    "Floco",
    "HypCluster",
    "KNNPer",
    "LGFedAvg",
    "Local",
    "PerFedAvg",
    "SuPerFed",
    "documented",
    "pFedFDA",
    "pFedHN",
    "pFedLA",
    "pFedMe",
    "qFedAvg",
]

METHODS: dict[str, type[AnyMethod]] = {
    "local": Local,
    "fedavg": FedAvg,
    "fedavgm": FedAvgM,
    "fedopt": FedOpt,
    "fednova": FedNova,
    "fedprox": FedProx,
    "moon": MOON,
    "scaffold": SCAFFOLD,
    "feddyn": FedDyn,
    "fedper": FedPer,
    "fedrep": FedRep,
    "lg-fedavg": LGFedAvg,
    "fedalt": FedAlt,
    "fedsim": FedSim,
    "fedbn": FedBN,
    "fedbabu": FedBABU,
    "fedrod": FedRoD,
    "feddbe": FedDBE,
    "fedcp": FedCP,
    "per-fedavg": PerFedAvg,
    "knn-per": KNNPer,
    "apfl": APFL,
    "fedala": FedALA,
    "pfedme": pFedMe,
    "ditto": Ditto,
    "fedfomo": FedFomo,
    "fedamp": FedAMP,
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
    "mr-mtl": MRMTL,
    "fedlc": FedLC,
    "fedntd": FedNTD,
    "fedphp": FedPHP,
    "fedcac": FedCAC,
    "apple": APPLE,
    "fedas": FedAS,
    "pfedfda": pFedFDA,
    "cfl": CFL,
    "q-fedavg": qFedAvg,
    "afl": AFL,
    "fedsam": FedSAM,
    "fedgh": FedGH,
    "fedtgp": FedTGP,
    "fml": FML,
    "fedgen": FedGen,
    "superfed": SuPerFed,
    "pfedla": pFedLA,
    "floco": Floco,
}


def documented(kind: type[AnyMethod]) -> str:
    """The docstring of a method's class, or of its file, followed by the formula and the hyper-parameters."""
    own = "" if (kind.__doc__ or "").startswith(f"{kind.__name__}(") else inspect.getdoc(kind) or ""  # dataclass's
    text = own or inspect.cleandoc(sys.modules[kind.__module__].__doc__ or "")
    listed = [
        f"{f.name}: {f.metadata.get('help', '')}" + (f" (default: {f.default})" if f.default is not None else "")
        for f in fields(kind)
        if f.name != "train"
    ]
    training = "train: local training, a coterie.LocalTraining; fields that are not set come from the protocol"
    formula = ["Formula", "-------", inspect.cleandoc(kind.formula), ""] if kind.formula else []
    return "\n".join([text, "", *formula, "Parameters", "----------", *listed, training])


for _kind in METHODS.values():  # for help(coterie.FedPAC)
    _kind.__doc__ = documented(_kind)

# Settings that have a name in the papers: name -> method, changed settings, title.
VARIANTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "fedavg-ft": ("fedavg", {}, "FedAvg-FT"),
    "per-fedavg-hf": ("per-fedavg", {"order": "hessian-free"}, "Per-FedAvg (HF)"),
    "heurfedamp": ("fedamp", {"attention": "cosine"}, "HeurFedAMP"),
    "fedadagrad": ("fedopt", {"server_optimizer": "adagrad", "server_beta1": 0.0, "server_lr": 0.1}, "FedAdagrad"),
    "fedyogi": ("fedopt", {"server_optimizer": "yogi"}, "FedYogi"),
    "fedadam": ("fedopt", {"server_optimizer": "adam"}, "FedAdam"),
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
