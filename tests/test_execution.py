"""Where clients run, and how precisely: what is chosen, what it changes, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import coterie
from coterie.api import Execution, fastest
from coterie.core.errors import CoterieError
from coterie.core.model import make_model
from coterie.core.samples import FederatedData
from tests import toy


@pytest.mark.parametrize("kind", ["looped", "batched"])
def test_bf16_changes_little_and_weights_stay_float32(kind: str) -> None:
    data, network = toy.toy(), toy.network().float()
    results = [
        coterie.run(
            toy.method("fedper"),
            network,
            data,
            rounds=2,
            where=coterie.Execution(kind, precision=precision, processes=1),
        )
        for precision in ("fp32", "bf16")
    ]
    full, half = (result.server.encoder["0.weight"] for result in results)
    assert half.dtype == torch.float32
    assert 0 < float((half - full).norm() / full.norm()) < 0.02
    assert results[1].model.precision == "fp32"  # who uses a personal model gets full precision


def test_what_is_refused() -> None:
    with pytest.raises(CoterieError, match="tf32 is something that GPUs have"):
        coterie.run(
            toy.method("fedavg"), toy.network(), toy.toy(), where=coterie.Execution(device="cpu", precision="tf32")
        )
    with pytest.raises(CoterieError, match="unknown precision 'fp8'"):
        coterie.run(toy.method("fedavg"), toy.network(), toy.toy(), where=coterie.Execution(precision="fp8"))


def dense(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(144, 8), nn.Dropout(dropout), nn.Linear(8, toy.CLASSES))


def test_what_is_chosen() -> None:
    """On a CPU, clients with small networks without convolutions side by side; on a GPU all that can be."""
    many, few = toy.toy(train=(8,) * 8, test=(2,) * 8), toy.toy()

    def chosen(network: nn.Module, data: FederatedData, device: str = "cpu", **how: int) -> str:
        model = make_model(network, toy.SHAPE, toy.CLASSES)
        return fastest(toy.method("fedavg"), model, data, device, Execution(**how))

    assert chosen(dense(), many) == "batched"
    assert chosen(dense(), few) == "looped"
    assert chosen(dense(), many, processes=2) == "looped"  # who asks for processes gets them
    assert chosen(dense(0.5), many) == "looped"
    assert chosen(toy.network(), many) == "looped"
    assert chosen(toy.network(), few, "cuda") == "batched"
    assert chosen(dense(0.5), many, "cuda") == "looped"
