"""Learning-rate schedules against torch.optim.lr_scheduler, over rounds and over local steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as their

from coterie.core import random
from coterie.core.batch import Data
from coterie.core.data import Transform
from coterie.core.errors import CoterieError
from coterie.core.schedules import read_schedule
from coterie.core.training import LocalTraining
from coterie.execution.looped import Looped
from tests import toy

TOTAL = 12
Make = Callable[[torch.optim.Optimizer], Any]
SAME: dict[str, Make] = {
    "constant": lambda o: their.ConstantLR(o, 1.0),
    "steps:8=0.04:4=0.2": lambda o: their.MultiStepLR(o, [4, 8], 0.2),
    "steps:5=0.5:10=0.25": lambda o: their.StepLR(o, 5, 0.5),
    "exponential:0.9": lambda o: their.ExponentialLR(o, 0.9),
    "cosine": lambda o: their.CosineAnnealingLR(o, TOTAL),
    "cosine:0.1": lambda o: their.CosineAnnealingLR(o, TOTAL, eta_min=0.1),
    "linear:0.25": lambda o: their.LinearLR(o, 1.0, 0.25, TOTAL),
    "warmup:4": lambda o: their.LinearLR(o, 0.25, 1.0, 3),
    "warmup:4+cosine:0.1": lambda o: their.SequentialLR(
        o, [their.LinearLR(o, 0.25, 1.0, 3), their.CosineAnnealingLR(o, TOTAL - 4, eta_min=0.1)], [4]
    ),
}


def of_torch(make: Make) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    schedule, found = make(optimizer), []
    for _ in range(TOTAL):
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize("text", SAME)
def test_factors_are_those_of_torch(text: str) -> None:
    wanted = pytest.approx(of_torch(SAME[text]), abs=1e-12)
    rounds, local = read_schedule(text), read_schedule("+".join(f"local-{part}" for part in text.split("+")))
    assert [rounds.factor(t, TOTAL, 3, 7) for t in range(TOTAL)] == wanted
    assert [local.factor(3, 7, t, TOTAL) for t in range(TOTAL)] == wanted


def test_both_kinds_multiply_and_a_last_training_is_not_at_rate_0() -> None:
    both = read_schedule("exponential:0.5+local-linear")
    assert both.factor(2, 10, 3, 4) == pytest.approx(0.25 * 0.25)
    assert (
        read_schedule("cosine").over_rounds(TOTAL, TOTAL) == read_schedule("cosine").over_rounds(TOTAL - 1, TOTAL) > 0
    )


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_local_steps_are_those_of_torch(optimizer: str) -> None:
    """Two epochs of three batches, the last of them smaller, with a rate that falls from step to step."""
    held, rate = toy.split((8,), 4), torch.ones((), dtype=torch.float64)
    data = Data(held.x.double() / 255, held.y, random.seed_key(5), rate, toy.CLASSES, Transform())
    train = LocalTraining(local_epochs=2, batch_size=3, lr=0.1, optimizer=optimizer, schedule="local-cosine:0.1")
    start = torch.ones(data.x[0].numel(), dtype=torch.float64)

    def loss(w: Any, batch: Any) -> torch.Tensor:
        return (batch.x.flatten(1) @ w["w"] - batch.y).square()

    ours, _ = train({"w": start}, loss, data, {})
    theirs = start.clone().requires_grad_()
    kinds = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    rule = kinds[optimizer]([theirs], lr=0.1)
    schedule = their.CosineAnnealingLR(rule, 6, eta_min=0.01)
    for epoch in train.runs(data):
        for batch in epoch:
            rule.zero_grad()
            loss({"w": theirs}, batch).mean().backward()
            rule.step()
            schedule.step()
    torch.testing.assert_close(ours["w"], theirs.detach(), rtol=0, atol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("name", ["fedavg", "pfedme", "fedrep", "fedem"])
def test_looped_is_stacked(name: str) -> None:
    """Clients of different sizes have different numbers of steps, so each has its own rates."""
    method = toy.method(name, schedule="warmup:2+linear:0.1+local-warmup:2+local-cosine:0.2")
    model, data = toy.model(), toy.toy()
    expected, _ = toy.looped(method, model, data)
    assert toy.distance(expected, toy.stacked(method, model, data)[0]) < 1e-10
    assert toy.distance(expected, toy.streams(method, model, data)[0]) < 1e-10


@pytest.mark.parametrize(
    ("name", "schedule"), [("scaffold", "local-cosine"), ("fednova", "local-linear"), ("q-fedavg", "cosine")]
)
def test_a_method_that_computes_with_the_rate_refuses(name: str, schedule: str) -> None:
    with pytest.raises(CoterieError, match=f"does not support --schedule {schedule}: its"):
        Looped(toy.method(name, schedule=schedule), toy.model(), toy.toy(), 7, processes=1).rehearse()
