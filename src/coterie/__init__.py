"""Coterie: personalized federated learning. Many clients learn together, and each ends up with its own model.

>>> import coterie
>>> data = coterie.load_clients(num_clients=4, local_size=40, test_size=20)
>>> result = coterie.run("fedpac", data, "linear", rounds=1, progress=False)
>>> model = result.personal_model(0)  # an ordinary torch module

data:       load_clients (by name or from files), clients_from (arrays, DataFrames, torch Datasets)
training:   run (one method), compare (several methods and seeds), tune (hyper-parameters, on validation samples)
results:    Result, Run (from load_run), Comparison, load_comparison
methods:    FedPAC, FedAvg, Ditto, ... (`coterie.methods`), or a subclass of Method of your own
settings:   LocalTraining, Settings, Protection, Execution, ...; `run` also takes each of their fields by name

`help(coterie.run)` lists all settings; `coterie --help` is the command line.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from coterie.core.version import VERSION as __version__

if TYPE_CHECKING:
    from coterie import methods
    from coterie.analysis.comparison import Comparison
    from coterie.api.comparing import compare, load_comparison
    from coterie.api.configuration import load_config
    from coterie.api.data import DataSettings, load_clients
    from coterie.api.methods import make_method
    from coterie.api.public import run
    from coterie.api.result import Result
    from coterie.api.saved_run import Run, load_run
    from coterie.core import init, losses, protections, random, ranges, statistics, tree
    from coterie.core.batch import Batch, Data, Epoch, features, sample_losses
    from coterie.core.data import FederatedData
    from coterie.core.errors import CoterieError
    from coterie.core.losses import cross_entropy
    from coterie.core.method import Census, Method
    from coterie.core.metric_scale import MetricScale
    from coterie.core.metrics import Metric, OutputMetric, SummedMetric
    from coterie.core.model import Model, Weights
    from coterie.core.optimizers import Adagrad, Adam, AdamW, Optimizer, Sgd
    from coterie.core.steps import fold
    from coterie.core.task import Classification, Task
    from coterie.core.tasks import MultiLabel, NextToken, Regression, Segmentation
    from coterie.core.training import LocalTraining
    from coterie.core.tree import Tree
    from coterie.data.user import clients_from
    from coterie.execution.choice import Execution
    from coterie.federation import Ending, History, Round, Safety, Settings
    from coterie.methods import *
    from coterie.models.adapters import freeze, lora
    from coterie.privacy import Protection
    from coterie.privacy.encryption import Encryption
    from coterie.tuning import tune

# Module -> its public names; all others are methods. Imported when first used, so that `coterie --help` starts fast.
_HOMES = {
    "coterie.api.comparing": ("compare", "load_comparison"),
    "coterie.api.configuration": ("load_config",),
    "coterie.api.data": ("DataSettings", "load_clients"),
    "coterie.api.methods": ("make_method",),
    "coterie.api.public": ("run",),
    "coterie.api.result": ("Result",),
    "coterie.api.saved_run": ("Run", "load_run"),
    "coterie.analysis.comparison": ("Comparison",),
    "coterie.core.batch": ("Batch", "Data", "Epoch", "features", "sample_losses"),
    "coterie.core.data": ("FederatedData",),
    "coterie.core.errors": ("CoterieError",),
    "coterie.core.losses": ("cross_entropy",),
    "coterie.core.method": ("Census", "Method"),
    "coterie.core.metric_scale": ("MetricScale",),
    "coterie.core.metrics": ("Metric", "OutputMetric", "SummedMetric"),
    "coterie.core.model": ("Model", "Weights"),
    "coterie.core.optimizers": ("Adagrad", "Adam", "AdamW", "Optimizer", "Sgd"),
    "coterie.core.task": ("Classification", "Task"),
    "coterie.core.tasks": ("MultiLabel", "NextToken", "Regression", "Segmentation"),
    "coterie.core.training": ("LocalTraining",),
    "coterie.core.steps": ("fold",),
    "coterie.core.tree": ("Tree",),
    "coterie.data.user": ("clients_from",),
    "coterie.execution.choice": ("Execution",),
    "coterie.federation": ("Ending", "History", "Round", "Safety", "Settings"),
    "coterie.models.adapters": ("freeze", "lora"),
    "coterie.privacy": ("Protection",),
    "coterie.privacy.encryption": ("Encryption",),
    "coterie.tuning": ("tune",),
}
_MODULES = {  # modules by their public names
    "methods": "coterie.methods",
    **{
        name: f"coterie.core.{name}"
        for name in ("init", "losses", "protections", "random", "ranges", "statistics", "tree")
    },
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "AFL",
    "APFL",
    "APPLE",
    "CFL",
    "FML",
    "GPFL",
    "MOON",
    "MRMTL",
    "PFAKD",
    "SCAFFOLD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Batch",
    "Census",
    "Classification",
    "Comparison",
    "CoterieError",
    "Data",
    "DataSettings",
    "Ditto",
    "Encryption",
    "Ending",
    "Epoch",
    "Execution",
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
    "FederatedData",
    "Floco",
    "History",
    "HypCluster",
    "KNNPer",
    "LGFedAvg",
    "Local",
    "LocalTraining",
    "Method",
    "Metric",
    "MetricScale",
    "Model",
    "MultiLabel",
    "NextToken",
    "Optimizer",
    "OutputMetric",
    "PerFedAvg",
    "Protection",
    "Regression",
    "Result",
    "Round",
    "Run",
    "Safety",
    "Segmentation",
    "Settings",
    "Sgd",
    "SuPerFed",
    "SummedMetric",
    "Task",
    "Tree",
    "Weights",
    "__version__",
    "clients_from",
    "compare",
    "cross_entropy",
    "features",
    "fold",
    "freeze",
    "init",
    "load_clients",
    "load_comparison",
    "load_config",
    "load_run",
    "lora",
    "losses",
    "make_method",
    "methods",
    "pFedFDA",
    "pFedHN",
    "pFedLA",
    "pFedMe",
    "protections",
    "qFedAvg",
    "random",
    "ranges",
    "run",
    "sample_losses",
    "statistics",
    "tree",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name in __all__:
        return getattr(importlib.import_module(_HOME.get(name, "coterie.methods")), name)
    raise AttributeError(f"module 'coterie' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
