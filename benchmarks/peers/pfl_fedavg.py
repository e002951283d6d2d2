"""FedAvg of pfl-research, without evaluation, with the users' samples as tensors in memory."""

from __future__ import annotations

from types import MethodType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam import NNTrainHyperParams
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn

from benchmarks.peers.shared import SEED, SharedWork, serve


def loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(net(x), y)


class Pfl:
    def __init__(self, work: SharedWork) -> None:
        np.random.seed(SEED)  # noqa: NPY002  # pfl-research draws from numpy's global state
        self.work, net = work, work.network()
        net.loss, net.metrics = MethodType(loss, net), MethodType(lambda net, x, y: {}, net)  # type: ignore[assignment]
        self.model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
        parts, users = work.parts(), iter(range(10**9))
        dataset = FederatedDataset(lambda user: PyTorchTensorDataset(parts[user]), lambda: next(users) % work.clients)
        self.backend: Any = SimulatedBackend(dataset, dataset)

    def rounds(self, count: int) -> None:
        settings = NNAlgorithmParams(
            central_num_iterations=count,
            evaluation_frequency=count + 1,
            train_cohort_size=self.work.clients,
            val_cohort_size=0,
        )
        training = NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=self.work.lr, local_batch_size=self.work.batch
        )
        FederatedAveraging().run(settings, self.backend, self.model, training)

    def answer(self, x: Tensor) -> Tensor:
        result: Tensor = self.model.pytorch_model(x)
        return result


if __name__ == "__main__":
    serve(Pfl)
