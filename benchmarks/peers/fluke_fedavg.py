"""FedAvg of fluke, without evaluation, on its fast data loaders."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers.shared import CLASSES, SEED, SharedWork, serve


class Fluke:
    def __init__(self, work: SharedWork) -> None:
        for name in ("nms", "qnms"):  # without them, torchvision from the package index needs a torch for CUDA
            torch.library.define(f"torchvision::{name}", "(Tensor boxes, Tensor scores, float most) -> Tensor")
        from fluke import DDict, FlukeENV
        from fluke.algorithms.fedavg import FedAVG
        from fluke.data import FastDataLoader

        env = FlukeENV()
        env.set_seed(SEED)
        env.set_device("cpu")
        env.set_inmemory(True)
        env.set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
        loaders = [
            FastDataLoader(x, y, num_labels=CLASSES, batch_size=work.batch, shuffle=True) for x, y in work.parts()
        ]
        splitter: Any = SimpleNamespace(assign=lambda clients, batch: ((loaders, [None] * clients), None))
        settings = {
            "client": {
                "batch_size": work.batch,
                "local_epochs": 1,
                "loss": nn.CrossEntropyLoss,
                "optimizer": {"name": "SGD", "lr": work.lr},
                "scheduler": {"name": "StepLR", "gamma": 1, "step_size": 1},
            },
            "server": {"weighted": True},
            "model": work.network(),
        }
        self.algorithm = FedAVG(work.clients, splitter, DDict(settings))

    def rounds(self, count: int) -> None:
        self.algorithm.server.fit(n_rounds=count, eligible_perc=1.0, finalize=False)

    def answer(self, x: Tensor) -> Tensor:
        result: Tensor = self.algorithm.server.model(x)
        return result


if __name__ == "__main__":
    serve(Fluke)
