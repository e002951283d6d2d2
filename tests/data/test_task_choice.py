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
