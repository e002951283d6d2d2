"""A metric that no client defines, such as AUROC where each client has one class."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import coterie
from coterie.core.errors import CoterieError

LOOPED = coterie.Execution(backend="looped", processes=1)
X = torch.randn(2, 40, 6, generator=torch.Generator().manual_seed(0))


def data() -> coterie.FederatedData:
    return coterie.clients_from([TensorDataset(x, torch.full((40,), i)) for i, x in enumerate(X)], metric="auroc")


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))


def test_a_result_says_so() -> None:
    result = coterie.run("fedavg", data(), network(), rounds=1, progress=False, backend=LOOPED)
    assert "FedAvg: AUROC is undefined for all clients: each has test samples of one class" in repr(result)
    assert "undefined" in repr(result.history[-1])
    clients = result.clients
    assert clients["auroc"].dtype == clients["FedAvg"].dtype == float
    assert clients["auroc"].isna().all()


@pytest.mark.long
def test_a_comparison_and_a_search_say_so(tmp_path: Path) -> None:
    compared = coterie.compare(["local", "fedavg"], data(), network(), rounds=1, seeds=2, progress=False)
    assert "Local: AUROC is undefined for all clients" in repr(compared)
    assert "nan" not in repr(compared) + compared._repr_html_()
    with pytest.raises(CoterieError, match="AUROC is undefined for the validation samples of all clients"):
        coterie.tune("fedavg", {"lr": [0.1]}, data(), network(), rounds=1, out=tmp_path / "tuned")
