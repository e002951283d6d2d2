"""FedAvg in Flower's simulation, on Ray with one worker. The time is that of the rounds, without the start of Ray."""

from __future__ import annotations

import time
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import Tensor

from benchmarks.peers.flower_client import train
from benchmarks.peers.shared import SharedWork, cpu_seconds, serve


class Flower:
    def __init__(self, work: SharedWork) -> None:
        self.work, self.net = work, work.network()

    def rounds(self, count: int) -> tuple[float, float]:
        """One simulation: a round in which workers start and load samples, which does not count, and the rounds."""
        client, server, taken = ClientApp(), ServerApp(), list[tuple[float, float]]()
        client.train()(train)

        @server.main()
        def main(grid: Grid, context: Context) -> None:
            strategy = FedAvg(fraction_evaluate=0.0, min_evaluate_nodes=0)
            config = ConfigRecord({"about": self.work.about})
            arrays = ArrayRecord(self.net.state_dict())
            strategy.start(grid=grid, initial_arrays=arrays, train_config=config, num_rounds=1)
            start, cpu = time.perf_counter(), cpu_seconds()
            result = strategy.start(grid=grid, initial_arrays=arrays, train_config=config, num_rounds=count)
            taken.append((time.perf_counter() - start, cpu_seconds() - cpu))
            self.net.load_state_dict(result.arrays.to_torch_state_dict())

        resources: Any = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": 1}}
        run_simulation(server, client, self.work.clients, backend_config=resources)
        return taken[0]

    def answer(self, x: Tensor) -> Tensor:
        result: Tensor = self.net(x)
        return result


if __name__ == "__main__":
    serve(Flower)
