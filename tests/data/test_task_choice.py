"""The task of a federation, as the user chooses it, must fit the data."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import TensorDataset

import coterie
from coterie.core.errors import CoterieError


def test_labels_that_are_all_ignored_are_refused() -> None:
    tokens = torch.randint(0, 5, (2, 20, 6), generator=torch.Generator().manual_seed(0))
    none = [TensorDataset(x, torch.full_like(x, -1)) for x in tokens]
    with pytest.raises(CoterieError, match="all labels are ignored"):
        coterie.clients_from(none, task="next-token", task_args={"classes": 5})
    some = [none[0], TensorDataset(tokens[1], tokens[1])]
    assert coterie.clients_from(some, task="next-token").task.described() == "next token, vocabulary of 5"


CLASSES = [TensorDataset(torch.randn(20, 3), torch.arange(20) % 2) for _ in range(2)]
NUMBERS = [TensorDataset(torch.randn(20, 3), torch.randn(20)) for _ in range(2)]


@pytest.mark.parametrize(
    ("clients", "options", "says"),
    [
        (CLASSES, "label_smoothing=abc", "label_smoothing of task classification must be a number, got 'abc'"),
        (CLASSES, "class_weights=3", "class_weights of task classification must be a list, each a number, got 3"),
        (CLASSES, "class_weights=[1,x]", "NAME=VALUE"),
        (CLASSES, "positive=1.5", "positive of task classification must be a whole number"),
        (CLASSES, "metric=3", "metric of task classification must be text or None"),
        (CLASSES, "classes=a", "classes"),
        (CLASSES, "classes=5", "option classes is 5, but the labels have 2 classes: 0, 1"),
        (NUMBERS, "mean=5", "mean of task regression must be a list"),
        (NUMBERS, "loss=3", "loss of task regression must be text"),
    ],
)
def test_options_of_another_type_are_refused(clients: list[TensorDataset], options: str, says: str) -> None:
    with pytest.raises(CoterieError, match=says):
        coterie.clients_from(clients, task_args=options)


def test_options_are_taken() -> None:
    data = coterie.clients_from(CLASSES, task_args={"class_weights": (1, 2.5), "positive": 0, "classes": 2})
    assert data.task.options["class_weights"] == [1, 2.5]
    named = coterie.clients_from(CLASSES, classes=["no", "yes"], task_args={"class_weights": {"yes": 1, "no": 2}})
    assert named.task.options["class_weights"] == [2, 1]


def test_next_tokens_of_named_inputs() -> None:
    """The task is guessed as for one input, and the vocabulary has the ids that only inputs have."""
    draw = torch.Generator().manual_seed(0)
    texts = torch.randint(0, 20, (2, 30, 9), generator=draw)
    texts[0, 0, 0] = 19
    texts[:, :, 1:].clamp_(max=10)
    clients = [({"ids": t[:, :-1], "mask": (t[:, :-1] > 3).long()}, t[:, 1:]) for t in texts]
    for task in (None, "next-token"):
        assert coterie.clients_from(clients, task=task).task.described() == "next token, vocabulary of 20"
    amounts = [({"ids": t[:, :-1].float()}, t[:, 1:] * 0.5) for t in texts]
    assert coterie.clients_from(amounts).task.name == "regression"
