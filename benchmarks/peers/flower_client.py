"""A client of Flower's simulation, which Ray's workers import."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor

from benchmarks.peers.shared import SHARED_WORK, SharedWork


@cache
def loaded(about: str) -> tuple[SharedWork, list[tuple[Tensor, Tensor]], torch.nn.Module]:
    """A workload, its samples and its network; once in every process."""
    torch.set_num_threads(1)
    work = next(work for work in SHARED_WORK.values() if work.about == about)
    return work, work.parts(), work.network()


def train(message: Message, context: Context) -> Message:
    """A round of one client."""
    work, parts, net = loaded(str(message.content["config"]["about"]))
    x, y = parts[int(context.node_config["partition-id"])]
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(net.parameters(), lr=work.lr)
    for index in torch.randperm(len(y)).split(work.batch):
        optimizer.zero_grad()
        F.cross_entropy(net(x[index]), y[index]).backward()
        optimizer.step()
    reply = {"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord({"num-examples": len(y)})}
    return Message(content=RecordDict(reply), reply_to=message)
