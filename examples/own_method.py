"""Your own method: FedAvg whose clients blend the global model with the model that they trained last.

python examples/own_method.py

On the command line: coterie run examples.own_method:FedBlend --share 0.7

A method is typed messages and pure functions: `server_*` run on the server, `client_*` on one client. The loop,
stacking of clients on a GPU, evaluation and byte counts come for free. docs/add-a-method.md says more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from torch import Tensor

import coterie
from coterie import Census, Data, Method, Model, Tree, Weights, tree


class Server(NamedTuple):  # what the server remembers
    weights: Weights


class State(NamedTuple):  # what a client remembers; it never leaves the client
    weights: Weights  # as the client trained them last
    momentum: Tree


class Down(NamedTuple):  # server -> client
    weights: Weights


class Up(NamedTuple):  # client -> server
    weights: Weights
    samples: Tensor  # () n_i


@dataclass(frozen=True)
class FedBlend(Method[Server, State, Down, Up]):
    share: float = field(default=0.5, metadata={"help": "share of the client's own model", "low": 0, "high": 1})

    title: ClassVar[str] = "FedBlend"
    results: ClassVar[dict[str, str]] = {"FedBlend": "pre"}  # the personal model before the next local training

    def server_init(self, model: Model, census: Census) -> Server:
        return Server(model.start)

    def server_send(self, server: Server, client: Tensor) -> Down:
        return Down(server.weights)

    def client_init(self, model: Model, data: Data, welcome: Tree) -> State:
        return State(model.start, self.train.start(model.start))

    def client_train(self, model: Model, state: State, down: Down, data: Data) -> tuple[State, Up]:
        weights, momentum = self.train(
            down.weights, lambda w, batch: model.loss(model(w, batch.x), batch), data, state.momentum
        )
        return State(weights, momentum), Up(weights, data.samples)

    def server_receive(self, server: Server, clients: Tensor, ups: Up) -> Server:
        return Server(tree.average(ups.weights, ups.samples))

    def client_predict(self, model: Model, state: State, down: Down, x: Tensor) -> Tensor:
        return model(tree.blend(down.weights, state.weights, 1 - self.share), x)

    def server_predict(self, model: Model, server: Server, x: Tensor) -> Tensor:
        return model(server.weights, x)


def main() -> None:
    data = coterie.load_clients("fashion-mnist-small", num_clients=6, local_size=20, test_size=40)
    found = coterie.compare(["local", FedBlend(share=0.7), "fedavg"], data, "linear", rounds=5, seeds=1, progress=False)
    print(found.to_markdown())


if __name__ == "__main__":
    main()
