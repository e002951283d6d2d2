"""FedAvg of Coterie, with the back end that it chooses on one core."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import coterie
from benchmarks.ours import Federation
from benchmarks.peers.shared import CLASSES, TESTS, SharedWork, serve
from benchmarks.published import FedAvgWithoutTuning
from coterie.api import Execution, make_network, place
from coterie.core.data import FederatedData, Split
from coterie.models import Network


class Coterie:
    def __init__(self, work: SharedWork) -> None:
        x, y, x_test, y_test = work.data()
        each = TESTS // work.clients
        held = FederatedData(
            "generated",
            CLASSES,
            Split(x, y, (work.samples,) * work.clients),
            Split(x_test, y_test, (each,) * work.clients),
        )
        net = work.network()
        model = make_network(Network(net[:-1], net[-1]), held, 0)
        train = coterie.LocalTraining(local_epochs=1, batch_size=work.batch, lr=work.lr, momentum=0.0, weight_decay=0.0)
        method: Any = FedAvgWithoutTuning().but(train=train)
        self.clients = place(method, model, held, 0, Execution(device="cpu"))
        self.federation = Federation(self.clients, work.clients)

    def rounds(self, count: int) -> None:
        for _ in range(count):
            self.federation.round()

    def answer(self, x: Tensor) -> Tensor:
        return self.clients.method.server_predict(self.clients.model, self.federation.server, (255 * x).round().byte())


if __name__ == "__main__":
    serve(Coterie)
