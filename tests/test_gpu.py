"""On a GPU: every method gives there what it gives on a CPU, fused, captured and replayed. Run with -m gpu."""

from __future__ import annotations

import pytest
import torch

from coterie.clients import Batched, Looped
from coterie.core.fused import FusedModel
from coterie.methods import METHODS
from tests import toy

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("batch_norm", [False, True], ids=["plain", "batchnorm"])
@pytest.mark.parametrize("name", [name for name, kind in METHODS.items() if kind.batched])
def test_every_method_gives_what_it_gives_on_a_cpu(name: str, batch_norm: bool) -> None:
    """In float64, ragged clients, partial participation."""
    method, model = toy.method(name), toy.model(batch_norm=batch_norm)
    data = toy.toy(train=(13, 20, 9, 31, 16)) if batch_norm else toy.toy()  # three of like size, so padded
    expected, history = toy.outcome(Looped(method, model, data, 7, processes=1), rounds=5)
    clients = Batched(method, model, data, 7, "cuda")
    assert isinstance(clients.fast, FusedModel) != batch_norm
    made, again = toy.outcome(clients, rounds=5)
    assert toy.distance({n: t.cpu() for n, t in made.items()}, expected) < 1e-9
    assert again.curve("pre") == history.curve("pre")
    assert clients.graphs.captured


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_precisions_learn_alike(precision: str) -> None:
    import coterie

    data = coterie.load_clients("fashion-mnist-small", num_clients=5, local_size=200, test_size=100)
    where = coterie.Execution(precision=precision)
    result = coterie.run("fedper", "cnn", data, rounds=5, where=where)
    exact = coterie.run("fedper", "cnn", data, rounds=5, where=coterie.Execution(device="cpu", processes=1))
    ours, theirs = (r.history.curve("pre")[-1][1] for r in (result, exact))
    assert abs(ours - theirs) < 0.03
    assert all(t.dtype == torch.float32 for t in result.server.encoder.values())


def test_memory_does_not_grow() -> None:
    data, method, model = toy.toy(), toy.method("fedpac"), toy.model(torch.float32)
    clients = Batched(method, model, data, 7, "cuda")
    toy.outcome(clients, rounds=20)
    before = torch.cuda.memory_allocated()
    clients = Batched(method, model, data, 7, "cuda")
    toy.outcome(clients, rounds=200)
    del clients
    assert torch.cuda.memory_allocated() < before + 2**20
