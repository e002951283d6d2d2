"""Where clients run: the interface of the federated loop, and what backends on this machine have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from coterie.core import ranges, tree
from coterie.core.data import FederatedData, Split
from coterie.core.errors import CoterieError, unknown
from coterie.core.method import AnyMethod, Census
from coterie.core.metric_scale import MetricScale
from coterie.core.model import Model
from coterie.core.ranges import Known
from coterie.core.rehearsal import SAMPLES, rehearse
from coterie.core.wrapper import innermost
from coterie.execution.answers import Answers, Returned, in_order, rows_where
from coterie.execution.batch_checks import check_batches, check_lone_samples
from coterie.execution.memory import ClientMemory
from coterie.execution.requests import Cohort, CohortInput, Request, Turn
from coterie.execution.scoring import Scores, constant_score, has_global, try_metrics, weighed

PRECISIONS = ("fp32", "tf32", "bf16")  # of matrix products
REMEMBERED = 16  # requests whose cohorts are remembered
TOO_LARGE = "out of memory: not even one client fits; try a smaller batch or network"


class Backend(ABC):
    """All clients of a federation, wherever they run. Client ids are ascending everywhere."""

    elsewhere: ClassVar[bool] = False  # True: client states are on the clients' own machines
    server_tests: bool = False  # whether the server has test samples of its own for the global model
    method: AnyMethod
    model: Model
    device: torch.device  # of messages
    states: ClientMemory  # client states, as far as they are known here
    num_clients: int  # m
    splits: list[str]  # that clients can be evaluated on
    census: Census
    chance: float | None  # score of a constant prediction on the test samples; None: unknown
    why: str = ""  # why clients run there, where it is not obvious
    largest: float = ranges.LIMIT  # largest allowed magnitude in an update

    @abstractmethod
    def join(self, welcome: tree.Tree) -> None:
        """Every client creates its first state."""

    def train(self, clients: Tensor, downs: Any, turn: Turn) -> Answers:
        """Train these clients, each with its row of downs; those with a usable answer keep their new state."""
        return self.begin(clients, downs, turn).sift()

    @abstractmethod
    def begin(self, clients: Tensor, downs: Any, turn: Turn) -> Returned:
        """`train` without waiting for a GPU."""

    @abstractmethod
    def finish(self, clients: Tensor, downs: Any, turn: Turn) -> None:
        """Run the final step of every client."""

    @abstractmethod
    def score(self, clients: Tensor, downs: Any, split: str) -> Scores:
        """Evaluate the personal models of these clients, each with its row of downs, on the client's own samples."""

    @abstractmethod
    def score_trained(self, downs: Any, returned: Returned, split: str) -> Scores:
        """`score` right after training: the fields of what a client returned replace those of what it was sent."""

    @abstractmethod
    def score_global(self, server: Any, split: str) -> Scores | None:
        """Evaluate the global model on every client's samples; None if there is none or it cannot be measured.

        With `server_tests`, on the server's own test samples instead of the clients'.
        """

    def close(self) -> None:
        """Release processes and device memory."""
        self.states.settle()

    def abandon(self) -> None:
        """Release them immediately, without finishing work in progress."""
        self.close()

    def known(self, clients: Tensor) -> Known:
        """The server's knowledge of these clients, on which the allowed ranges of their updates depend."""
        return Known(innermost(self.method), self.census.samples[clients], self.largest)

    @property
    def everyone(self) -> Tensor:
        return torch.arange(self.num_clients)

    @property
    def metric(self) -> MetricScale:
        """What scores are of."""
        return self.model.task.metric.scale


class LocalBackend(Backend):
    """A backend whose data and client states are in this process.

    A subclass decides which clients are computed together, and computes them; the results do not depend on it.
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
        self.fast = self.model  # the model that computes, perhaps fused
        self.has_global: bool | None = None  # None: not known yet
        self.num_clients = data.num_clients
        self.splits = ["test"] if data.validation is None else ["test", "validation"]
        self.census = Census(torch.tensor(data.train.sizes), data.train.class_counts(data.classes))
        self.chance = constant_score(data.task, data.test)
        self.states = ClientMemory(data.num_clients, self.device, state_dir)
        self.remembered: dict[Any, Sequence[Cohort]] = {}  # by request, ordered by last use
        check_batches(method, data)
        check_lone_samples(method, self.model, data)

    def rehearse(self) -> None:
        """Try the method on a few samples; errors name the function and what is wrong with it."""
        model = self.model.to("cpu")
        rehearse(self.method, model, *rehearsal_samples(self.data))
        try_metrics(model, self.data.test)

    @abstractmethod
    def cohorts(self, request: Request, clients: Tensor) -> Sequence[Cohort]:
        """Partition these clients into cohorts."""

    @property
    def limit(self) -> int:
        """Largest number of clients of a cohort."""
        return self.num_clients

    @abstractmethod
    def compute(self, request: Request, cohort: Cohort, states: Any, downs: Any) -> Any:
        """Compute a request for a cohort, with its rows of states and downs. Results have the client axis in front.

        join and finish return states, train returns (states, ups), score and score_global what `scoring.score` does.
        """

    def each(self, request: Request, inputs: Iterable[CohortInput]) -> Iterator[tuple[CohortInput, Any]]:
        """Compute a request for all inputs; yields (input, result) in any order."""
        return ((given, self.compute(request, *given)) for given in inputs)

    def join(self, welcome: tree.Tree) -> None:
        self._renew(Request("join", shared=welcome), ())

    def begin(self, clients: Tensor, downs: Any, turn: Turn) -> Returned:
        def parts() -> Iterator[tuple[Tensor, Any]]:
            for (cohort, before, _), (after, ups) in self._work(Request("train", turn=turn), clients, downs):
                usable = ranges.sound(ups, self.known(cohort.clients)).to(self.device, non_blocking=True)
                finite = usable & tree.finite(after, len(cohort.clients)).to(self.device, non_blocking=True)
                self.states.keep(self._ids(cohort), rows_where(finite, after, before))
                yield cohort.rows, (finite, ups)

        finite, ups = in_order(len(clients), parts())
        return Returned(clients, ups, finite, known=self.known(clients))

    def finish(self, clients: Tensor, downs: Any, turn: Turn) -> None:
        if len(clients) < self.num_clients:
            raise ValueError("all clients must finish together: their states may change form")
        self._renew(Request("finish", turn=turn), downs)

    def score(self, clients: Tensor, downs: Any, split: str) -> Scores:
        return self._scores(Request("score", split), clients, downs)

    def score_trained(self, downs: Any, returned: Returned, split: str) -> Scores:
        return self.score(returned.clients, tree.overlay(downs, returned.ups), split)

    def score_global(self, server: Any, split: str) -> Scores | None:
        if not self.predicts_globally(server):
            return None
        return self._scores(Request("score_global", split, shared=server), self.everyone, ())

    def predicts_globally(self, server: Any) -> bool:
        """Whether the method has a global model."""
        if self.has_global is None:
            self.has_global = has_global(self.method, self.fast, server, self.data)
        return self.has_global

    def every(self, action: str, clients: Tensor, downs: Any, server: Any = ()) -> Tensor:
        """(S, M + 1 + D) every metric on test samples, the sum of losses, and `Task.detail`, on the CPU.

        action: score, with the download of each client, or score_global. clients: all have test samples.
        """
        work = self._work(Request(action, "test", every=True, shared=server), clients, downs)
        found: Tensor = in_order(len(clients), ((given.cohort.rows, row) for given, row in work))
        return found.cpu()

    def split(self, name: str) -> Split:
        split: Split | None = getattr(self.data, name)
        if split is None:
            raise CoterieError(f"these clients have no {name} samples")
        return split

    @property
    def burden(self) -> int:
        """Bytes of a model or of a client state, whichever is larger."""
        return max(tree.size(self.model.start), self.states.row_bytes)

    def _ids(self, cohort: Cohort) -> Tensor:
        return cohort.clients if self.states.home == torch.device("cpu") else cohort.ids

    def _work(self, request: Request, clients: Tensor, downs: Any) -> Iterator[tuple[CohortInput, Any]]:
        """Compute a request cohort by cohort; yields inputs and results."""

        def given(cohort: Cohort) -> CohortInput:
            states = self.states.take(self._ids(cohort)) if request.action in ("train", "finish", "score") else ()
            return CohortInput(cohort, states, tree.pick(downs, cohort.rows))

        return self.each(request, map(given, self._cohorts(request, clients)))

    def _cohorts(self, request: Request, clients: Tensor) -> Sequence[Cohort]:
        """`cohorts`, remembered: making them copies ids to the device, which waits for it."""
        about = (request.action, request.split, request.every, self.limit, clients.numpy().tobytes())
        cohorts = self.remembered.pop(about, None) or self.cohorts(request, clients)
        self.remembered[about] = cohorts
        if len(self.remembered) > REMEMBERED:
            self.remembered.pop(next(iter(self.remembered)))
        return cohorts

    def _scores(self, request: Request, clients: Tensor, downs: Any) -> Scores:
        total = torch.tensor(self.split(request.split).sizes)[clients]
        if not total.any():  # no client has samples of this split
            none = torch.zeros(len(clients), dtype=torch.float64)
            return Scores(clients, none, total, none)
        work = self._work(request, clients, downs)
        found = in_order(len(clients), ((given.cohort.rows, row) for given, row in work))  # (S, parts and loss)
        weighted, loss = weighed(self.model.task, found, total)
        return Scores(clients, weighted, total, loss)

    def _renew(self, request: Request, downs: Any) -> None:
        """Replace the states of all clients, perhaps by states of another form."""
        new = self.states.blank()
        for given, states in self._work(request, self.everyone, downs):
            new.keep(given.cohort.clients, states)
        self.states = new


def rehearsal_samples(data: FederatedData) -> tuple[Tensor, Tensor]:
    """A few training samples to rehearse a method on."""
    return data.train.x[: max(SAMPLES)], data.train.y[: max(SAMPLES)]


def check_draws(model: Model) -> None:
    """Refuse networks that draw random numbers from a hidden stream, which clients computed together would share."""
    if model.hidden_draws:
        raise CoterieError(
            f"this network cannot be stacked, it draws from torch's random stream in {model.hidden_draws}; use "
            "backend=looped, or nn.Dropout, whose masks are drawn for each client"
        )


def set_precision(precision: str, device: torch.device) -> None:
    """Allow or forbid TF32 for float32 matrix products, in this process."""
    if precision not in PRECISIONS:
        raise unknown("precision", precision, PRECISIONS)
    if precision == "tf32" and device.type != "cuda":
        raise CoterieError("precision tf32 needs a GPU; on a CPU use fp32 or bf16")
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
