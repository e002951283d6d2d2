"""FedAvg as a plain loop: one module, one optimizer for each client, and the mean of the weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.peers.shared import SharedWork, serve


class Plain:
    def __init__(self, work: SharedWork) -> None:
        self.work, self.net, self.parts = work, work.network(), work.parts()

    def rounds(self, count: int) -> None:
        for _ in range(count):
            start = {name: value.clone() for name, value in self.net.state_dict().items()}
            sums = {name: torch.zeros_like(value) for name, value in start.items()}
            for x, y in self.parts:
                self.net.load_state_dict(start)
                optimizer = torch.optim.SGD(self.net.parameters(), lr=self.work.lr)
                for index in torch.randperm(len(y)).split(self.work.batch):
                    optimizer.zero_grad()
                    F.cross_entropy(self.net(x[index]), y[index]).backward()
                    optimizer.step()
                for name, value in self.net.state_dict().items():
                    sums[name] += value / len(self.parts)
            self.net.load_state_dict(sums)

    def answer(self, x: Tensor) -> Tensor:
        result: Tensor = self.net(x)
        return result


if __name__ == "__main__":
    serve(Plain)
