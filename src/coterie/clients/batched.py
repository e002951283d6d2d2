"""Clients side by side: one call trains a whole cohort, stacked along a leading axis. The fast way on a GPU.

Clients of a cohort are padded to the longest; padding changes no result. On CUDA the whole update of a cohort is
captured as a graph when its shape comes back, and replayed from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from coterie.clients.base import (
    Answers,
    AnyMethod,
    Clients,
    Scores,
    Turn,
    global_logits,
    has_global,
    judge,
    keys,
    scores,
    slices,
)
from coterie.clients.graphs import Graphs
from coterie.core import tree
from coterie.core.errors import CoterieError
from coterie.core.local import TEST_BATCH, Data
from coterie.core.model import Model
from coterie.core.samples import FederatedData, Split

CPU_COHORT = 32  # clients side by side where memory cannot be asked
GLOBAL_BATCH = 4096  # samples of one forward pass of the global model


class Cohort(NamedTuple):
    """Clients that are computed together."""

    rows: Tensor  # (C,) their places among the clients asked for
    clients: Tensor  # (C,) their ids
    samples: Tensor  # (C, n) places of their samples in the split, padded with any
    real: Tensor | tuple[()]  # (C, n) False where padded; (): nowhere


class Batched(Clients):
    def __init__(
        self,
        method: AnyMethod,
        model: Model,
        data: FederatedData,
        seed: int,
        device: torch.device | str = "cpu",
        cohort: int | None = None,  # None: all that fit
    ) -> None:
        if not method.batched:
            raise CoterieError(f"{method.title} cannot be batched; use clients=looped")
        super().__init__(method, model.to(device), data, seed)
        refuse_dropout(self.model)
        self.device = torch.device(device)
        self.cohort = cohort or (CPU_COHORT if self.device.type == "cpu" else data.clients)
        self.splits = {
            name: Split(split.x.to(self.device), split.y.to(self.device), split.sizes)
            for name in ("train", "test", "validation")
            if (split := getattr(data, name)) is not None
        }
        self.graphs = Graphs(self.device)
        self.states: Any = None  # stacked, all m

    def join(self, welcome: tree.Tree) -> None:
        def one(data: Data) -> Any:
            return self.method.client_init(self.model, data, welcome)

        self.states = self._over("join", one, self._everyone, "train", Turn(-1))

    def train(self, clients: Tensor, downs: Any, turn: Turn) -> Answers:
        def one(data: Data, state: Any, down: Any) -> Any:
            return self.method.client_train(self.model, state, down, data)

        states, ups = self._over("train", one, clients, "train", turn, self._states(clients), downs)
        finite = tree.finite((states, ups), len(clients)).cpu()  # the one time that a round waits for the device
        good = finite.nonzero()[:, 0]
        if len(good) < len(clients):
            states, ups = tree.pick((states, ups), good.to(self.device))
        self.states = tree.put(self.states, clients[good].to(self.device), states)
        return Answers(clients[good], ups, tuple(clients[~finite].tolist()))

    def finish(self, clients: Tensor, downs: Any, turn: Turn) -> None:
        def one(data: Data, state: Any, down: Any) -> Any:
            return self.method.client_finish(self.model, state, down, data)

        if len(clients) < self.data.clients:
            raise ValueError("all clients finish together: what they remember may change its form")
        self.states = self._over("finish", one, clients, "train", turn, self.states, downs)

    def score(self, clients: Tensor, downs: Any, split: str) -> Scores:
        def one(data: Data, state: Any, down: Any) -> Tensor:
            parts = slices(len(data.y), TEST_BATCH)
            logits = [self.method.client_predict(self.model, state, down, data.x[part]) for part in parts]
            judged = judge(torch.cat(logits), data.y)  # (n, 2)
            return judged.sum(0) if data.real is None else torch.where(data.real[:, None], judged, 0.0).sum(0)

        with torch.no_grad():
            counted = self._over("score", one, clients, split, Turn(-1), self._states(clients), downs)
        return scores(clients, counted, self.split(split))

    def score_global(self, server: Any, split: str) -> Scores | None:
        if not has_global(self.method, self.model, server, self.data):
            return None
        held = self.splits[split]
        parts = held.ranges() if self.model.tests_by_batch else [slice(0, len(held.y))]
        places = [place for whole in parts for place in slices(whole.stop, self._global_batch, whole.start)]
        with torch.no_grad():
            judged = [judge(global_logits(self.method, self.model, server, held.x[p]), held.y[p]) for p in places]
        owners = held.owners().to(self.device)
        counted = torch.zeros(len(held.sizes), 2, dtype=torch.float64, device=self.device)
        return scores(self._everyone, counted.index_add_(0, owners, torch.cat(judged)), held)

    def state(self, client: int) -> Any:
        return tree.apply(lambda t: t[client].cpu(), self.states)

    @property
    def _everyone(self) -> Tensor:
        return torch.arange(self.data.clients)

    @property
    def _global_batch(self) -> int:
        return TEST_BATCH if self.model.tests_by_batch else GLOBAL_BATCH

    def _states(self, clients: Tensor) -> Any:
        return tree.pick(self.states, clients.to(self.device))

    def _over(self, name: str, one: Callable[..., Any], clients: Tensor, split: str, turn: Turn, *given: Any) -> Any:
        """one(data, *row of each given) for every client; the results stacked in the order of clients."""
        while True:
            try:
                cohorts = list(self._cohorts(clients, split))
                parts = [
                    self._run(name, one, c, split, turn, tree.pick(given, c.rows.to(self.device))) for c in cohorts
                ]
                break
            except torch.cuda.OutOfMemoryError:
                if self.cohort == 1:
                    raise CoterieError("not even one client fits into the memory of the GPU") from None
                self.cohort = (min(self.cohort, len(clients)) + 1) // 2
                torch.cuda.empty_cache()
        if len(parts) == 1:
            return parts[0]
        places = torch.cat([c.rows for c in cohorts]).argsort().to(self.device)
        return tree.apply(lambda *rows: joined(rows)[places], *parts)

    def _run(self, name: str, one: Callable[..., Any], cohort: Cohort, split: str, turn: Turn, given: Any) -> Any:
        held = self.splits[split]

        def client(x: Tensor, y: Tensor, real: Any, key: Tensor, rate: Tensor, given: Any) -> Any:
            mask = real if isinstance(real, Tensor) else None
            return one(Data(x, y, key, rate, self.data.classes, self.data.transform, mask), *given)

        def body(samples: Tensor, real: Any, key: Tensor, rate: Tensor, given: Any) -> Any:
            together = torch.func.vmap(client, in_dims=(0, 0, 0, 0, None, 0))
            return together(held.x[samples], held.y[samples], real, key, rate, given)

        key = keys(self.seed, turn, cohort.clients).to(self.device)
        rate = torch.tensor(turn.rate, dtype=self.model.mean.dtype, device=self.device)
        return self.graphs.run(f"{name} {split}", body, (cohort.samples, cohort.real, key, rate, given))

    def _cohorts(self, clients: Tensor, split: str) -> Iterator[Cohort]:
        """Clients of like size together, as many as the limit allows."""
        held = self.split(split)
        sizes = torch.tensor(held.sizes)[clients]
        families: dict[int, list[int]] = {}
        for row in sizes.argsort(stable=True).tolist():
            families.setdefault(self._family(int(sizes[row])), []).append(row)
        for family in families.values():
            for part in slices(len(family), self.cohort):
                rows = torch.tensor(family[part]).sort().values
                yield self._cohort(rows, clients[rows], sizes[rows], held)

    def _family(self, size: int) -> int:
        """Padding must not meet BatchNorm: there only clients whose batches have equal sizes go together."""
        if self.model.tests_by_batch or (self.model.batch_norm and self.method.holds_out):
            return size
        train = self.method.train
        return size % train.batch if self.model.batch_norm and not train.drop_last else 0

    def _cohort(self, rows: Tensor, clients: Tensor, sizes: Tensor, held: Split) -> Cohort:
        place = torch.arange(max(int(sizes.max()), 1))  # (n,)
        real = place < sizes[:, None]  # (C, n)
        start = torch.tensor(held.starts)[clients]
        samples = (
            torch.where(real, place, 0) + start.clamp_max(max(len(held.y) - 1, 0))[:, None]
        )  # padding: own samples
        padded = () if bool(real.all()) else real.to(self.device)
        return Cohort(rows, clients, samples.to(self.device), padded)


def joined(parts: tuple[Tensor, ...]) -> Tensor:
    """Rows of all parts; where what is kept for each sample is of unlike length, filled with zeros at the end."""
    if parts[0].ndim > 1:
        longest = max(part.shape[1] for part in parts)
        fill = [0, 0] * (parts[0].ndim - 2)
        parts = tuple(nn.functional.pad(part, (*fill, 0, longest - part.shape[1])) for part in parts)
    return torch.cat(parts)


def refuse_dropout(model: Model) -> None:
    """Dropout draws from a hidden stream, which clients side by side would share."""
    for module in (*model.encoder.modules(), *model.head.modules()):
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            raise CoterieError("a network with dropout cannot be batched; use clients=looped, or dropout 0")
