"""What the federated loop asks of clients, wherever they run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.clients.states import States
from coterie.core import order, padding, tree
from coterie.core.errors import CoterieError
from coterie.core.local import TEST_BATCH, Data
from coterie.core.method import Census, Method
from coterie.core.model import Model, set_precision
from coterie.core.samples import FederatedData, Split

AnyMethod = Method[Any, Any, Any, Any]


class Turn(NamedTuple):
    """One round, as its clients need to know it."""

    round: int
    rate: float = 1.0  # factor on the learning rate
    measured: bool = True  # whether those who trained are measured right after it


class Answers(NamedTuple):
    """What came back from training."""

    clients: Tensor  # (S,) ids of those whose answer can be used, ascending
    ups: Any  # one Up with a leading axis of S
    left_out: tuple[int, ...]  # ids of those whose answer was not finite; their state is as before
    silent: tuple[int, ...] = ()  # ids of those who did not answer; the same


class Returned(NamedTuple):
    """The same before anybody has waited for it: which answers can be used is known on the device only."""

    clients: Tensor  # (S,) all that answered
    ups: Any
    finite: Tensor  # (S,)
    silent: tuple[int, ...] = ()

    def whole(self) -> Answers:
        """As if all could be used."""
        return Answers(self.clients, self.ups, (), self.silent)

    def sift(self) -> Answers:
        ok = self.finite.cpu()  # waits for the device, if the flags are there
        if bool(ok.all()):
            return self.whole()
        ups = tree.pick(self.ups, self.finite.nonzero()[:, 0])
        return Answers(self.clients[ok], ups, tuple(self.clients[~ok].tolist()), self.silent)


class Scores(NamedTuple):
    """How a model does on each client's samples. All (S,)."""

    clients: Tensor
    correct: Tensor
    total: Tensor
    loss: Tensor  # mean cross entropy

    @property
    def accuracy(self) -> Tensor:
        return self.correct / self.total.clamp_min(1)


class Job(NamedTuple):
    """What is asked of clients."""

    task: str  # join, train, finish, score or score_global
    split: str = "train"  # the samples it is about
    turn: Turn = Turn(-1)
    told: Any = ()  # what all are told alike: the welcome in join, the server's state in score_global


class Cohort(NamedTuple):
    """Clients that are computed in one call."""

    clients: Tensor  # (C,) ids, ascending
    ids: Tensor  # (C,) the same on the device
    rows: Tensor  # (C,) their places among the clients asked for, on the device
    length: int = 0  # side by side: samples that each of them has, with padding
    ragged: bool = False  # whether any is padded
    steps: int = 0  # of one epoch of all of them, without padding
    padded: int = 0  # and with it


class Task(NamedTuple):
    """A cohort, and its rows of what is given to it."""

    cohort: Cohort
    states: Any
    downs: Any


class Clients(ABC):
    """All clients of a federation, wherever they are. Ids are ascending everywhere."""

    elsewhere: ClassVar[bool] = False  # True: what they remember is on machines of their own
    method: AnyMethod
    model: Model
    device: torch.device  # where messages are
    states: States  # what is known here of what clients remember
    count: int  # m
    splits: list[str]  # that they can be measured on
    census: Census
    chance: float  # how often one is right who guesses the commonest class

    @abstractmethod
    def join(self, welcome: tree.Tree) -> None:
        """Every client makes its first state."""

    def train(self, clients: Tensor, downs: Any, turn: Turn) -> Answers:
        """These clients train with their row of downs; those with a finite answer keep their new state."""
        return self.begin(clients, downs, turn).sift()

    @abstractmethod
    def begin(self, clients: Tensor, downs: Any, turn: Turn) -> Returned:
        """The same, not waiting for a GPU."""

    @abstractmethod
    def finish(self, clients: Tensor, downs: Any, turn: Turn) -> None:
        """The last thing that clients do."""

    @abstractmethod
    def score(self, clients: Tensor, downs: Any, split: str) -> Scores:
        """The personal models of these clients, each with its row of downs, on the client's own samples."""

    @abstractmethod
    def score_trained(self, downs: Any, returned: Returned, split: str) -> Scores:
        """The same right after training: what a client sent back takes the place of what it was sent."""

    @abstractmethod
    def score_global(self, server: Any, split: str) -> Scores | None:
        """The global model on every client's samples; None if there is none, or it cannot be measured."""

    def close(self) -> None:
        """Give back processes and the memory of the device."""
        self.states.settle()

    def abandon(self) -> None:
        """The same at once, in the middle of whatever they do."""
        self.close()

    @property
    def everyone(self) -> Tensor:
        return torch.arange(self.count)


class Resident(Clients):
    """Clients whose data and memory are here.

    A kind of them says which are computed together, and computes: the same in, the same out.
    """

    def __init__(
        self,
        method: AnyMethod,
        model: Model,
        data: FederatedData,
        seed: int,
        device: torch.device | str = "cpu",
        state_dir: str | None = None,
    ) -> None:
        self.device = torch.device(device)
        set_precision(model.precision, self.device)
        self.method, self.model, self.data, self.seed = method, model.to(device), data, seed
        self.fast = self.model  # what is computed with
        self.has_global: bool | None = None  # None: not known yet
        self.count = data.clients
        self.splits = ["test"] if data.validation is None else ["test", "validation"]
        self.census = Census(torch.tensor(data.train.sizes), data.train.class_counts(data.classes))
        self.chance = commonest(data.test.class_counts(data.classes))
        self.states = States(data.clients, self.device, state_dir)
        check_batches(method, data)

    @abstractmethod
    def cohorts(self, job: Job, clients: Tensor) -> Sequence[Cohort]:
        """These clients, each in one cohort."""

    @abstractmethod
    def compute(self, job: Job, cohort: Cohort, states: Any, downs: Any) -> Any:
        """The work of a cohort with its rows of states and downs; what comes out has a leading axis too.

        join and finish give states, train gives (states, ups), score and score_global (C, 2) sums over samples.
        """

    def each(self, job: Job, tasks: Iterable[Task]) -> Iterator[tuple[Task, Any]]:
        """Tasks with what came of them, in whatever order."""
        return ((task, self.compute(job, *task)) for task in tasks)

    def join(self, welcome: tree.Tree) -> None:
        self._renew(Job("join", told=welcome), ())

    def begin(self, clients: Tensor, downs: Any, turn: Turn) -> Returned:
        def parts() -> Iterator[tuple[Tensor, Any]]:
            for (cohort, before, _), (after, ups) in self._work(Job("train", turn=turn), clients, downs):
                finite = tree.finite((after, ups), len(cohort.clients)).to(self.device)
                self.states.keep(self._ids(cohort), rows_where(finite, after, before))
                yield cohort.rows, (finite, ups)

        finite, ups = in_order(len(clients), parts())
        return Returned(clients, ups, finite)

    def finish(self, clients: Tensor, downs: Any, turn: Turn) -> None:
        if len(clients) < self.count:
            raise ValueError("all clients finish together: what they remember may change its form")
        self._renew(Job("finish", turn=turn), downs)

    def score(self, clients: Tensor, downs: Any, split: str) -> Scores:
        return self._scores(Job("score", split), clients, downs)

    def score_trained(self, downs: Any, returned: Returned, split: str) -> Scores:
        return self.score(returned.clients, tree.overlay(downs, returned.ups), split)

    def score_global(self, server: Any, split: str) -> Scores | None:
        if self.has_global is None:
            self.has_global = has_global(self.method, self.fast, server, self.data)
        if not self.has_global:
            return None
        return self._scores(Job("score_global", split, told=server), self.everyone, ())

    def state(self, client: int) -> Any:
        """What this client remembers, on the CPU."""
        return self.states[client]

    def split(self, name: str) -> Split:
        split: Split | None = getattr(self.data, name)
        if split is None:
            raise CoterieError(f"these clients have no {name} samples")
        return split

    @property
    def burden(self) -> int:
        """Bytes of a model, or of what a client remembers if that is more."""
        return max(tree.size(self.model.start), self.states.row_bytes)

    def _ids(self, cohort: Cohort) -> Tensor:
        return cohort.clients if self.states.home == torch.device("cpu") else cohort.ids

    def _work(self, job: Job, clients: Tensor, downs: Any) -> Iterator[tuple[Task, Any]]:
        """Cohort by cohort: what was given, and what came of it."""

        def task(cohort: Cohort) -> Task:
            states = self.states.take(self._ids(cohort)) if job.task in ("train", "finish", "score") else ()
            return Task(cohort, states, tree.pick(downs, cohort.rows))

        return self.each(job, map(task, self.cohorts(job, clients)))

    def _scores(self, job: Job, clients: Tensor, downs: Any) -> Scores:
        total = torch.tensor(self.split(job.split).sizes)[clients]
        if not total.any():  # nobody has samples to be tested on
            none = torch.zeros(len(clients), dtype=torch.float64)
            return Scores(clients, none, total, none)
        work = self._work(job, clients, downs)
        counted = in_order(len(clients), ((task.cohort.rows, sums) for task, sums in work))
        right, loss = counted.unbind(1)
        return Scores(clients, right, total, loss / total.clamp_min(1).to(loss.device, non_blocking=True))

    def _renew(self, job: Job, downs: Any) -> None:
        """All clients get a new state, perhaps of another form."""
        new = self.states.blank()
        for task, states in self._work(job, self.everyone, downs):
            new.keep(task.cohort.clients, states)
        self.states = new


def cohort_of(clients: Tensor, rows: Tensor, device: torch.device, *about: Any) -> Cohort:
    """Some of the clients asked for; about: what else is to be said of them."""
    return Cohort(clients[rows], clients[rows].to(device), rows.to(device), *about)


def in_order(count: int, parts: Iterable[tuple[Tensor, Any]]) -> Any:
    """One tree of so many rows from parts: which rows (C,), and the rows (C, ...). Each part is let go of at once."""
    whole: Any = None
    for rows, part in parts:
        if len(rows) == count:
            return part
        if whole is None:
            whole = tree.apply(lambda t: t.new_empty(count, *t.shape[1:]), part)
        tree.apply(lambda t, new, rows=rows: t.index_copy_(0, rows, new), whole, part)
    return whole


def rows_where(condition: Tensor, yes: Any, no: Any) -> Any:
    """Row by row, by a condition (S,)."""
    return tree.apply(lambda a, b: torch.where(condition.view(-1, *[1] * (a.ndim - 1)), a, b), yes, no)


def act(method: AnyMethod, model: Model, job: Job, data: Data, state: Any, down: Any) -> Any:
    """What one client does."""
    match job.task:
        case "join":
            return method.client_init(model, data, job.told)
        case "train":
            return method.client_train(model, state, down, data)
        case "finish":
            return method.client_finish(model, state, down, data)
    raise ValueError(f"'{job.task}' is nothing that clients do")


def keys(seed: int, turn: Turn, clients: Tensor) -> Tensor:
    """(S,) the randomness of these clients in this round."""
    return order.fold(order.fold(order.seed_key(seed), turn.round), clients)


def send(method: AnyMethod, server: Any, clients: Tensor) -> Any:
    """One Down with a leading axis: row s is for clients[s]. What all get alike is not copied."""
    device = next((t.device for t in tree.leaves(server)), clients.device)
    clients = clients.to(device, non_blocking=True)
    if method.batched:
        return torch.func.vmap(lambda client: method.server_send(server, client))(clients)
    return tree.stack([method.server_send(server, client) for client in clients])


def global_logits(method: AnyMethod, model: Model, server: Any, x: Tensor) -> Tensor:
    logits = method.server_predict(model, server, x)
    if logits is None:
        raise ValueError(f"{method.title} has no global model")
    return logits


def has_global(method: AnyMethod, model: Model, server: Any, data: FederatedData) -> bool:
    x = data.train.x[:2].to(model.mean.device)  # BatchNorm cannot take one alone
    with torch.no_grad():
        return method.server_predict(model, server, x) is not None


def judge(logits: Tensor, y: Tensor) -> Tensor:
    """(n, 2) for each sample: 1 if right, and its cross entropy."""
    right = (logits.argmax(1) == y).to(torch.float64)
    return torch.stack([right, F.cross_entropy(logits, y, reduction="none").to(torch.float64)], 1)


def tally(predict: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, real: Tensor | None = None) -> Tensor:
    """(2,) how many of these samples are right, and the sum of their cross entropies."""
    total = torch.zeros(2, dtype=torch.float64, device=y.device)
    with torch.no_grad():
        for part in slices(len(y), TEST_BATCH):
            with padding.known(None if real is None else real[part]):
                judged = judge(predict(x[part]), y[part])  # (B, 2)
            total = total + (judged if real is None else torch.where(real[part, None], judged, 0.0)).sum(0)
    return total


def slices(stop: int, size: int) -> list[slice]:
    return [slice(at, min(at + size, stop)) for at in range(0, stop, size)]


def commonest(class_counts: Tensor) -> float:
    """Share of the class that most samples have: how often a guess is right."""
    counts = class_counts.sum(0)
    return float(counts.max() / counts.sum().clamp_min(1))


def check_batches(method: AnyMethod, data: FederatedData) -> None:
    """Drop-last with a client smaller than a batch would silently mean that it never trains."""
    if not method.train.drop_last:
        return
    small = [i for i, n in enumerate(data.train.sizes) if n < method.train.batch]
    if small:
        raise CoterieError(
            f"batch size {method.train.batch} with drop-last leaves nothing to train on: client {small[0]} has "
            f"{data.train.sizes[small[0]]} samples ({len(small)} such clients); use a smaller batch or no drop-last"
        )
