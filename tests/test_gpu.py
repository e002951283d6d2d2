"""On a GPU: every method gives there what it gives on a CPU, fused, captured and replayed. Run with -m gpu."""

from __future__ import annotations

import time
import warnings

import pytest
import torch
from torch import nn

from coterie.core import tree
from coterie.core.model import make_model
from coterie.core.tasks import NextToken
from coterie.execution import Looped, Stacked, Streams
from coterie.federation import History, Settings
from coterie.federation.rounds import play
from coterie.gpu.fusion import FusedModel
from coterie.methods import METHODS
from tests import precisions, toy

pytestmark = pytest.mark.gpu
READ_A_NUMBER = {"floco"}  # on the server: whether this is the round of its projection


@pytest.mark.parametrize("batch_norm", [False, True], ids=["plain", "batchnorm"])
@pytest.mark.parametrize("name", [name for name, kind in METHODS.items() if kind.stackable])
def test_every_method_gives_what_it_gives_on_a_cpu(name: str, batch_norm: bool) -> None:
    """In float64, ragged clients, partial participation."""
    method, model = toy.method(name), toy.model(batch_norm=batch_norm)
    data = toy.toy(train=(13, 20, 9, 31, 16)) if batch_norm else toy.toy()  # three of like size, so padded
    expected, history = toy.outcome(Looped(method, model, data, 7, processes=1), rounds=5)
    clients = Stacked(method, model, data, 7, "cuda")
    assert isinstance(clients.fast, FusedModel) != batch_norm
    made, again = toy.outcome(clients, rounds=5)
    assert toy.distance({n: t.cpu() for n, t in made.items()}, expected) < 1e-9
    assert again.curve("pre") == history.curve("pre")
    assert clients.graphs.captured


@pytest.mark.parametrize("batch_norm", [False, True], ids=["plain", "batchnorm"])
@pytest.mark.parametrize("name", [name for name, kind in METHODS.items() if kind.stackable])
def test_every_method_gives_it_on_streams(name: str, batch_norm: bool) -> None:
    """In float64, on three branches, clients of several sizes."""
    method, model, data = toy.method(name), toy.model(batch_norm=batch_norm), toy.toy()
    expected, history = toy.outcome(Looped(method, model, data, 7, processes=1), rounds=3)
    clients = Streams(method, model, data, 7, "cuda", branches=3)
    made, again = toy.outcome(clients, rounds=3)
    assert toy.distance({n: t.cpu() for n, t in made.items()}, expected) < 1e-9
    assert again.curve("pre") == history.curve("pre")
    assert all(branch.graphs.captured for branch in clients.branches)


@pytest.mark.parametrize("kind", [Stacked, Streams])
@pytest.mark.parametrize(
    ("name", "optimizer"),
    [("fedavg", "sgd"), ("pfedme", "sgd"), ("fedrep", "sgd"), ("fedavg", "adamw"), ("fedrep", "adamw")],
)
def test_rates_that_change_from_step_to_step(kind: type[Stacked] | type[Streams], name: str, optimizer: str) -> None:
    """Clients of different sizes have different numbers of steps, so each has its own rates."""
    schedule, momentum = "warmup:2+linear:0.1+local-warmup:2+local-cosine:0.2", 0.5 if optimizer == "sgd" else 0.0
    method = toy.method(name, optimizer=optimizer, momentum=momentum, schedule=schedule)
    model, data = toy.model(), toy.toy()
    expected, _ = toy.outcome(Looped(method, model, data, 7, processes=1), rounds=3)
    made, _ = toy.outcome(kind(method, model, data, 7, "cuda"), rounds=3)
    assert toy.distance({n: t.cpu() for n, t in made.items()}, expected) < 1e-9


class ReadsValues(nn.Module):
    """A network that cannot be recorded: it reads a value on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Sequential(nn.Flatten(), nn.Linear(144, 6)), nn.Linear(6, toy.CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.isfinite(x).all().item():
            raise ValueError("not finite")
        logits: torch.Tensor = self.head(self.encoder(x))
        return logits


def test_a_network_that_cannot_be_recorded_runs_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    method, data = toy.method("fedavg"), toy.toy()
    model = make_model(ReadsValues(), toy.SHAPE, toy.CLASSES, head="head").to("cpu", torch.float64)
    expected, _ = toy.outcome(Looped(method, model, data, 7, processes=1), rounds=2)
    made, _ = toy.outcome(Streams(method, model, data, 7, "cuda", branches=2), rounds=2)
    assert toy.distance({n: t.cpu() for n, t in made.items()}, expected) < 1e-9
    assert "computed without CUDA graphs" in caplog.text


def test_a_recurrent_network_on_streams() -> None:
    data, model = toy.of_task("next-token")
    net = nn.Sequential(nn.Embedding(6, 8), Recurrent(), nn.Linear(16, 6))
    model = make_model(net, (7,), NextToken(6), sample_type=torch.int64, label=(7,)).to("cpu", torch.float64)
    expected, _ = toy.outcome(Looped(toy.method("fedavg"), model, data, 7, processes=1), rounds=2)
    made, _ = toy.outcome(Streams(toy.method("fedavg"), model, data, 7, "cuda", branches=2), rounds=2)
    assert toy.distance({n: t.cpu() for n, t in made.items()}, expected) < 1e-9


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.lstm(x)[0]
        return found


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_precisions_learn_alike(precision: str) -> None:
    import coterie

    data = coterie.load_clients("fashion-mnist-small", num_clients=5, local_size=200, test_size=100)
    where = coterie.Execution(precision=precision)
    result = coterie.run("fedper", data, "cnn", rounds=5, backend=where)
    exact = coterie.run("fedper", data, "cnn", rounds=5, backend=coterie.Execution(device="cpu", processes=1))
    ours, theirs = (r.history.curve("pre")[-1][1] for r in (result, exact))
    assert abs(ours - theirs) < 0.03
    assert all(t.dtype == torch.float32 for t in result.server.shared.encoder.values())


@pytest.mark.parametrize("backend", ["stacked", "streams"])
@pytest.mark.parametrize(
    ("dataset", "metric"), [("heart-grades", "auroc"), ("heart-findings", "macro_f1"), ("heart-rate", "r2")]
)
def test_every_task_ends_with_every_metric(dataset: str, metric: str, backend: str) -> None:
    """Whole runs, with a primary metric that needs all outputs at once."""
    import coterie

    data = coterie.load_clients(dataset, metric=metric)

    def final(where: coterie.Execution) -> dict[str, float]:
        result = coterie.run("fedavg", data, rounds=1, local_epochs=1, backend=where)
        rows = result.clients.select_dtypes("number").mean()
        return {str(name): float(value) for name, value in rows.items()}

    ours = final(coterie.Execution(backend))
    theirs = final(coterie.Execution("looped", device="cpu", processes=1))
    assert ours.keys() == theirs.keys()
    assert ours == pytest.approx(theirs, rel=0.02, abs=0.02, nan_ok=True)


@pytest.mark.parametrize(("name", "precision", "way"), precisions.COMBINATIONS)
def test_every_precision_model_and_way(name: str, precision: str, way: str) -> None:
    """Without pytest on that machine: `python -m tests.precisions`."""
    assert precisions.distance(name, precision, way, "cuda") <= precisions.TOLERANCE[precision]


@pytest.mark.parametrize("kind", [Stacked, Streams])
@pytest.mark.parametrize("name", [n for n, kind in METHODS.items() if kind.stackable and n not in READ_A_NUMBER])
def test_a_round_waits_once(name: str, kind: type[Stacked] | type[Streams]) -> None:
    method, data = toy.method(name), toy.toy(train=(13, 20, 9, 31, 16))
    clients, settings = kind(method, toy.model(torch.float32), data, 7, "cuda"), Settings(rounds=9, seed=7)
    server = method.server_init(clients.model, clients.census)
    clients.join(method.server_welcome(server))
    for number in range(3):  # all that waits once in a run is behind it then: recording, cohorts, kernels
        server, _ = play(server, clients, settings, number)
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            start = time.perf_counter()
            server, record = play(server, clients, settings, 3)
            seconds = time.perf_counter() - start
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [w for w in said if "called a synchronizing CUDA operation" in str(w.message)]
    assert len(waits) == 1, [f"{w.filename}:{w.lineno}" for w in waits]
    assert record.seconds.keys() == {"send", "train", "evaluate", "receive"}
    assert 0 < record.seconds["train"] < sum(record.seconds.values()) < seconds
    assert all(t.device.type == "cpu" and not t.is_pinned() for t in tree.leaves((record.scores, record.report)))
    clients.close()


@pytest.mark.parametrize("name", ["fedavg", "fedpac", "scaffold"])
def test_a_client_that_diverges_is_left_out_as_on_a_cpu(name: str) -> None:
    def made(device: str) -> tuple[tree.Tree, History]:
        clients = toy.Spoilt(toy.method(name), toy.model(), toy.toy(), 7, device, spoilt={3: float("nan")})
        return toy.outcome(clients, join_ratio=1.0)

    (expected, history), (found, again) = made("cpu"), made("cuda")
    assert [record.left_out for record in again[:3]] == [(3,)] * 3
    assert toy.distance({n: t.cpu() for n, t in found.items()}, expected) < 1e-9
    assert again.curve("pre") == history.curve("pre")
    assert again.curve("post") == history.curve("post")


def test_a_tree_is_fetched_to_the_last_bit() -> None:
    given = {"a": torch.rand(3, 5).cuda(), "b": (torch.arange(4), torch.rand(4, 6).cuda().T[1:])}
    found = tree.fetched(given)
    toy.assert_same(tree.flatten(found), {n: t.cpu() for n, t in tree.items(given)})
    assert found["b"][0] is given["b"][0]


@pytest.mark.parametrize("kind", [Stacked, Streams])
def test_memory_does_not_grow(kind: type[Stacked] | type[Streams]) -> None:
    data, method, model = toy.toy(), toy.method("fedpac"), toy.model(torch.float32)
    clients = kind(method, model, data, 7, "cuda")
    toy.outcome(clients, rounds=20)
    before = torch.cuda.memory_allocated()
    clients = kind(method, model, data, 7, "cuda")
    toy.outcome(clients, rounds=200)
    del clients
    assert torch.cuda.memory_allocated() < before + 2**20
