"""Checks a method's declared protections against its behavior in one round of a tiny federation.

`--dp client` gives the server the noisy mean of all clients instead of each update, so the server must depend on means
only. `--dp sample` adds noise to gradients, so samples must act through gradients only: if training takes no step,
messages must not depend on samples, and the loss of a sample must not depend on other samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from coterie.core import random, tree
from coterie.core.batch import Batch, Data, Epoch
from coterie.core.method import AnyMethod, Census
from coterie.core.training import LocalTraining
from coterie.core.tree import Tree
from coterie.privacy.examine import close_to, tiny_model, tiny_samples
from coterie.privacy.updates import SIZES

CLIENTS = torch.tensor([0, 2])  # of three
FAILED = (RuntimeError, ValueError, LookupError, TypeError, AttributeError)


def only_means(method: AnyMethod) -> str | None:
    """Why the server needs more than the mean of what clients send; None if it does not."""
    model, samples = tiny_model(batch_norm=False), tiny_samples()
    counts = torch.stack([data.counts.long() for data in samples])
    server = method.server_init(model, Census(counts.sum(1), counts))
    blank = method.server_init(model, Census(torch.ones_like(counts.sum(1)), torch.zeros_like(counts)))
    if not close_to(method.server_welcome(server), method.server_welcome(blank), 0.0):
        return "it sends clients values computed from all clients' sample or class counts, without noise"
    ups = tree.stack([answer(method, model, server, samples[i], i) for i in CLIENTS.tolist()])
    if not tree.leaves(ups):
        return "its clients send nothing"
    whole = [name for name, t in tree.items(ups) if not t.is_floating_point()]
    if whole:
        return f"its clients send integers in `{whole[0]}`, which get no noise"
    flat = {n: torch.ones_like(t) if n.partition(".")[0] in SIZES else t for n, t in tree.items(ups)}
    mean = {n: t.mean(0, keepdim=True).expand_as(t) for n, t in flat.items()}
    try:
        own, same = (method.server_receive(server, CLIENTS, tree.fill(ups, sent, leaf=None)) for sent in (flat, mean))
    except FAILED as error:
        return f"its server cannot be examined: {error}"
    for name, value in zip(type(own)._fields, own, strict=True):
        if not close_to(value, getattr(same, name), 1e-9):
            return f"its server computes `{name}` from the updates of single clients, not from their mean"
    return None


def answer(method: AnyMethod, model: Any, server: Any, data: Data, client: int) -> Any:
    state = method.client_init(model, data, method.server_welcome(server))
    return method.client_train(model, state, method.server_send(server, torch.tensor(client)), data)[1]


@dataclass(frozen=True)
class Probe(LocalTraining):
    """Takes no step; records the number of samples and the loss of one fixed sample."""

    seen: list[Tensor] = field(default_factory=list, kw_only=True, compare=False)

    def runs(self, data: Data) -> Iterator[Epoch]:
        self.seen.append(torch.tensor(float(len(data.y))))
        yield Epoch(data.batch(torch.zeros(1, dtype=torch.int64), 0), 1, 1, 0)  # the sample that all sets share

    def step(
        self, params: Any, loss: Callable[[Any, Batch], Tensor], batch: Batch, rate: Tensor, momentum: Tree
    ) -> tuple[Any, Tree]:
        with torch.no_grad():
            self.seen.append(loss(params, batch).detach())
        return params, momentum


def only_gradients(method: AnyMethod) -> str | None:
    """Why samples act other than through gradients; None if they do not.

    A client trains a round, then once more with a probe: on its samples, and on others that share the first of them.
    """
    model, samples = tiny_model(batch_norm=False), tiny_samples()
    data, client = samples[2], 2
    others = data.x.flip(1, 2, 3).clone()
    others[0] = data.x[0]
    labels = data.y.clone()
    labels[1:] = data.y[0]
    counts = torch.stack([own.counts.long() for own in samples])
    begun, seen, sent, kept = [], [], [], []
    try:
        server = method.server_init(model, Census(counts.sum(1), counts))
        welcome = method.server_welcome(server)
        states, ups = zip(
            *(
                method.client_train(model, method.client_init(model, own, welcome), down, own)
                for i, own in enumerate(samples)
                for down in [method.server_send(server, torch.tensor(i))]
            ),
            strict=True,
        )
        server = method.server_receive(server, torch.arange(len(samples)), tree.stack(list(ups)))
        server = method.server_train(model, server, random.server_key(0, 0))
        down = method.server_send(server, torch.tensor(client))
        for own in (data, replace(data, x=others, y=labels)):
            begun.append(method.client_init(model, own, welcome))
            probe = Probe(**{f.name: getattr(method.train, f.name) for f in fields(LocalTraining)})
            state, up = replace(method, train=probe).client_train(model, states[client], down, own)
            seen.append(torch.cat([t.double().flatten() for t in [torch.zeros(1), *probe.seen]]))
            sent.append(up)
            kept.append(state)
    except FAILED as error:
        return f"its training cannot be examined: {error}"
    for what, (one, other) in (("keep", begun), ("send", sent), ("keep", kept)):
        for name, value in zip(type(one)._fields, one, strict=True):
            if not close_to(value, getattr(other, name), 1e-9):
                return f"its clients {what} `{name}`, which depends on samples other than by gradients, without noise"
    if seen[0].shape != seen[1].shape or not torch.allclose(seen[0], seen[1], atol=1e-9):
        return "the loss of a sample depends on other samples of its client, without noise"
    return None


JUDGES: dict[str, Callable[[AnyMethod], str | None]] = {"dp-client": only_means, "dp-sample": only_gradients}
