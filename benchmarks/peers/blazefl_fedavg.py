"""FedAvg of BlazeFL, single-threaded: its threads need a Python without the global interpreter lock."""

from __future__ import annotations

from typing import Any

from blazefl.contrib import FedAvgBaseClientTrainer, FedAvgBaseServerHandler
from blazefl.reproducibility import setup_reproducibility
from torch import Generator, Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.peers.shared import SEED, SharedWork, serve


class Clients:
    """The samples, and the network, as BlazeFL asks for them."""

    def __init__(self, work: SharedWork) -> None:
        self.work, self.sets = work, [TensorDataset(x, y) for x, y in work.parts()]

    def get_dataloader(
        self, type_: Any, cid: int, batch_size: int, generator: Generator | None = None
    ) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.sets[cid], batch_size=batch_size, shuffle=True, generator=generator)

    def select_model(self, model_name: str) -> nn.Module:
        return self.work.network()


class BlazeFL:
    def __init__(self, work: SharedWork) -> None:
        setup_reproducibility(SEED)
        clients: Any = Clients(work)
        common = {"model_selector": clients, "model_name": "", "dataset": clients, "num_clients": work.clients}
        common |= {"device": "cpu", "batch_size": work.batch, "seed": SEED}
        self.server = FedAvgBaseServerHandler(global_round=10**9, sample_ratio=1.0, **common)
        self.trainer = FedAvgBaseClientTrainer(epochs=1, lr=work.lr, **common)

    def rounds(self, count: int) -> None:
        for _ in range(count):
            chosen = self.server.sample_clients()
            self.trainer.local_process(self.server.downlink_package(), chosen)
            for package in self.trainer.uplink_package():
                self.server.load(package)

    def answer(self, x: Tensor) -> Tensor:
        result: Tensor = self.server.model(x)
        return result


if __name__ == "__main__":
    serve(BlazeFL)
