"""A tiny federation that has everything that goes wrong: ragged clients, absent classes, a client with one sample."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from coterie.core import tree
from coterie.core.data import FederatedData, Split, Transform
from coterie.core.method import AnyMethod
from coterie.core.model import Model, make_model
from coterie.core.task import IGNORED
from coterie.core.tasks import MultiLabel, NextToken, Regression, Segmentation
from coterie.core.training import LocalTraining
from coterie.execution import Backend, Looped, Request, Stacked, Streams
from coterie.execution.choice import Execution
from coterie.execution.graphs import Graphs
from coterie.execution.requests import Cohort
from coterie.federation import History, Settings, federate
from coterie.methods import METHODS
from coterie.models.unet import unet
from tests.fake_graphs import FakeGraphs

CLASSES = 4
SHAPE = (1, 12, 12)
TRAIN_SIZES = (13, 20, 1, 31, 8)
TEST_SIZES = (7, 9, 3, 11, 4)
IN_TURN = Execution("looped", processes=1)  # without starting processes, which takes longer than the toy's training


def split(sizes: tuple[int, ...], seed: int) -> Split:
    draw = torch.Generator().manual_seed(seed)
    n = sum(sizes)
    y = torch.randint(0, CLASSES, (n,), generator=draw)
    y[: sizes[0]] = y[: sizes[0]] % 2  # client 0 lacks half of the classes
    x = torch.randint(0, 60, (n, *SHAPE), generator=draw, dtype=torch.uint8)
    x[torch.arange(n), 0, 2 * y, :] += 150  # something to learn: a bright row
    return Split(x, y, sizes)


def toy(
    train: tuple[int, ...] = TRAIN_SIZES,
    test: tuple[int, ...] = TEST_SIZES,
    augmented: bool = True,
    validation: tuple[int, ...] | None = None,
) -> FederatedData:
    transform = Transform((0.5,), (0.5,), crop=2, flip=True) if augmented else Transform((0.5,), (0.5,))
    held = split(validation, 3) if validation else None
    return FederatedData("toy", CLASSES, split(train, 1), split(test, 2), held, transform)


def of_task(kind: str) -> tuple[FederatedData, Model]:
    """The same clients with other labels: of a kind of task other than classification."""
    data = toy(augmented=False)
    tasks = {"regression": Regression(2, (5.0, -1.0), (3.0, 0.5)), "multi-label": MultiLabel(3)}
    task = (tasks | {"next-token": NextToken(6), "segmentation": Segmentation(3)})[kind]

    def of(split: Split, seed: int) -> Split:
        draw = torch.Generator().manual_seed(seed)
        if kind == "multi-label":
            return replace(split, y=(split.y[:, None] > torch.arange(3)).float())
        if kind == "segmentation":  # 4 x 12: neither side is the number of features of a pixel
            x, drawn = split.x[..., :4, :], torch.randint(IGNORED, 2, (len(split.y), 4, 12), generator=draw)
            return replace(split, x=x, y=torch.where(x[:, 0] > 60, 2, drawn))
        if kind == "regression":
            noise = torch.randn(len(split.y), 2, generator=draw, dtype=torch.float64)
            y = torch.stack([split.y, -split.y], 1) * torch.tensor([3.0, 0.5]) + torch.tensor([5.0, -1.0])
            return replace(split, y=y + 0.1 * noise)
        tokens = torch.randint(0, 6, (len(split.y), 8), generator=draw)
        tokens[:, 1::2] = (tokens[:, ::2] + 1) % 6  # every second token follows from the one before
        y = tokens[:, 1:].clone()
        y[::3, -1] = IGNORED
        return Split(tokens[:, :-1], y, split.sizes)

    train, test = of(data.train, 11), of(data.test, 12)
    nets = {"next-token": token_network, "segmentation": pixel_network}
    if kind in nets:
        net = nets[kind]()
    else:
        net = network()
        net[-1] = nn.Linear(8, task.width)  # type: ignore[operator]
    made = replace(
        data,
        classes=0,
        train=train,
        test=test,
        task=task,
        transform=Transform() if kind == "next-token" else data.transform,
    )
    sample = (made.shape, task, made.transform)
    model = make_model(net, *sample, sample_type=train.x.dtype, label=made.label_shape).to("cpu", torch.float64)
    return made, model


def token_network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(6, 5), nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6))


def pixel_network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return unet((1, 4, 12), 3, width=8)


def network(batch_norm: bool = False, seed: int = 0, dropout: float = 0.0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        norm = [nn.BatchNorm2d(4)] if batch_norm else []
        maps, features = ([nn.Dropout2d(dropout)], [nn.Dropout(dropout)]) if dropout else ([], [])
        convolution = nn.Sequential(nn.Conv2d(1, 4, 3), *norm, nn.MaxPool2d(2), *maps, nn.LeakyReLU(), nn.Flatten())
        return nn.Sequential(*convolution, nn.Linear(100, 8), *features, nn.LeakyReLU(), nn.Linear(8, CLASSES))


def network_for(name: str, batch_norm: bool = False) -> nn.Module:
    """A network that this method accepts."""
    return norm_network() if METHODS[name].needs_norm else network(batch_norm)


def norm_network() -> nn.Module:
    return network(batch_norm=True)


def mixing_network() -> nn.Module:
    """Its BatchNorms mix the samples of a batch: one in training, the other in testing too."""
    *layers, linear, activation, head = network(batch_norm=True)  # type: ignore[misc]
    return nn.Sequential(*layers, linear, nn.BatchNorm1d(8, track_running_stats=False), activation, head)


def model(dtype: torch.dtype = torch.float64, batch_norm: bool = False, seed: int = 0, dropout: float = 0.0) -> Model:
    return make_model(network(batch_norm, seed, dropout), SHAPE, CLASSES, Transform((0.5,), (0.5,))).to("cpu", dtype)


# Settings whose default is made for hundreds of features or rounds; the toy's network has eight, its runs three.
GENTLE: dict[str, dict[str, Any]] = {
    "feddbe": {"pull": 1.0},
    "floco": {"begin": 1},
    "superfed": {"begin": 1},
}


def method(name: str, **changes: Any) -> AnyMethod:
    training = {"local_epochs": 2, "batch_size": 8, "lr": 0.05, "momentum": 0.5, "weight_decay": 1e-3}
    own = {k: changes.pop(k) for k in list(changes) if k not in LocalTraining.__dataclass_fields__}
    return METHODS[name](train=LocalTraining(**(training | changes)), **(GENTLE.get(name, {}) | own))


class Spoilt(Stacked):
    """Some of them send numbers that are not finite: in all they send, or in the first tensor only."""

    def __init__(self, *given: Any, spoilt: dict[int, float], first_only: bool = False) -> None:
        super().__init__(*given)
        self.spoilt, self.first_only = spoilt, first_only  # client -> number

    def compute(self, request: Request, cohort: Cohort, states: Any, downs: Any) -> Any:
        made = super().compute(request, cohort, states, downs)
        if request.action != "train":
            return made
        sent = tree.apply(torch.clone, made[1])
        for t in tree.leaves(sent)[: 1 if self.first_only else None]:
            for row, client in enumerate(cohort.clients.tolist()):
                if client in self.spoilt and t.is_floating_point():
                    t[row] = self.spoilt[client]
        return made[0], sent


def outcome(clients: Backend, **settings: Any) -> tuple[tree.Tree, History]:
    """All that a run leaves in tensors, and its history."""
    server, history = federate(clients, Settings(**{"rounds": 3, "join_ratio": 0.6, "seed": 7} | settings))
    states = {str(i): unpadded(clients.states[i]) for i in range(clients.data.num_clients)}
    clients.close()
    return tree.flatten({"server": server, "states": states}), history


def unpadded(state: Any) -> Any:
    """A memory of samples without its padding: side by side, a client has as many rows as the longest beside it.

    Such a memory says itself which of its rows are `real`; a padded one has the same real rows in the same order.
    """
    if not isinstance(state, tuple):
        return state
    if "real" in getattr(state, "_fields", ()):
        return tree.pick(state, state.real)  # type: ignore[attr-defined]
    return type(state)(*map(unpadded, state)) if hasattr(state, "_fields") else state


def looped(
    m: AnyMethod, net: Model, data: FederatedData, processes: int = 1, **settings: Any
) -> tuple[tree.Tree, History]:
    return outcome(Looped(m, net, data, settings.get("seed", 7), processes=processes), **settings)


def stacked(
    m: AnyMethod, net: Model, data: FederatedData, cohort: int | None = None, **settings: Any
) -> tuple[tree.Tree, History]:
    return outcome(Stacked(m, net, data, settings.get("seed", 7), cohort=cohort), **settings)


def streams(
    m: AnyMethod, net: Model, data: FederatedData, recorded: bool = True, **settings: Any
) -> tuple[tree.Tree, History]:
    """On three branches; recorded: as logs of operations that stand for CUDA graphs."""
    backend = Streams(m, net, data, settings.get("seed", 7), branches=3)
    for branch in backend.branches if recorded else ():
        branch.graphs = Graphs(FakeGraphs(), shared=True)
    made = outcome(backend, **settings)
    assert all(branch.graphs.recorder for branch in backend.branches) == recorded, "not recorded"
    return made


def distance(a: tree.Tree, b: tree.Tree) -> float:
    assert a.keys() == b.keys()
    return max((gap(a[k], b[k]) for k in a if a[k].numel()), default=0.0)


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    if a.dtype == torch.bool:
        return float((a ^ b).any())
    return float((a - b).abs().max())


def assert_same(a: tree.Tree, b: tree.Tree) -> None:
    """To the last bit."""
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def rows(scores: Any) -> list[list[float]]:
    return [column.tolist() for column in scores]
