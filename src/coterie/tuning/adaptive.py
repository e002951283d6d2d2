"""Candidates proposed one at a time by Optuna's TPE from the scores so far: searches tpe and asha.

The trial files are the only record. A resumed search starts Optuna again with the same seed and replays the recorded
scores, so it makes the same proposals. Optuna's SQLite storage cannot do this: it does not store the state of the
sampler.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from coterie.api.variations import Candidate
from coterie.core.errors import CoterieError
from coterie.core.metric_scale import ACCURACY_SCALE, MetricScale
from coterie.tuning.space import Space, Span
from coterie.tuning.strategy import BudgetSpent, Job, SearchBudget, SearchStrategy, Stage, Trial, halving

if TYPE_CHECKING:
    import optuna

ASKS = 100  # proposals per candidate; in a small space most repeat an earlier one


def optuna_version() -> str:
    """Raises if Optuna is missing."""
    try:
        import optuna
    except ImportError:
        raise CoterieError("--search tpe and asha need Optuna: pip install 'coterie[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return importlib.metadata.version("optuna")


class Adaptive(SearchStrategy):
    """tpe: every candidate trains all rounds. asha (eta): after each stage, only the best 1/eta so far continue."""

    def __init__(
        self,
        space: Space,
        count: int,
        rounds: int,
        seeds: Sequence[int],
        budget: SearchBudget,
        *,
        seed: int,
        eta: int | None = None,
        metric: MetricScale = ACCURACY_SCALE,
    ) -> None:
        stages = [Stage(count, rounds)] if eta is None else halving(count, rounds, eta)
        super().__init__([], stages, seeds, budget, metric)
        self.space, self.count, self.seed, self.eta = space, count, seed, eta

    def run(self, train: Callable[[Job], Trial], dropped: Callable[[int], None] = lambda candidate: None) -> None:
        study, names = self.study(), dict[str, int]()
        kinds = {name: distribution(values) for name, values in self.space.items()}
        for _ in range(ASKS * self.count):
            trial = study.ask(kinds)
            settings = {name: chosen(self.space[name], value) for name, value in trial.params.items()}
            number = names.setdefault(json.dumps(settings), len(names))
            if number == len(self.candidates):
                self.add(number, settings)
            try:
                study.tell(trial, self.score(number, trial, train), skip_if_finished=True)
            except BudgetSpent:
                stage = next(s for s in self.stages if self.left([number], s.rounds))
                self.untried, more = self.left([number], stage.rounds), self.count - number - 1
                self.later = [f"then {more} more settings"] if more else []
                return
            dropped(number)
            if len(self.candidates) == self.count:
                return

    def study(self) -> optuna.Study:
        import optuna

        optuna_version()
        sampler = optuna.samplers.TPESampler(seed=self.seed, n_startup_trials=max(4, self.count // 4))
        # the pruner expects stage k to be reported as step eta^k
        halved = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=self.eta or 2)
        pruner = optuna.pruners.NopPruner() if self.eta is None else halved
        return optuna.create_study(sampler=sampler, pruner=pruner, direction="maximize")

    def add(self, number: int, settings: Candidate) -> None:
        before = self.recorded.get(number)
        if before is not None and json.dumps(before) != json.dumps(settings):
            raise CoterieError(
                f"the search was started with other libraries: candidate {number} was {before} and is now {settings}; "
                "use the same versions, or another folder"
            )
        self.candidates.append(settings)

    def score(self, number: int, trial: optuna.Trial, train: Callable[[Job], Trial]) -> float:
        """Train a candidate stage by stage until it fails or is pruned. One that failed has the worst score."""
        worst = 0.0 if self.metric.share and self.metric.higher else -sys.float_info.max
        merit = worst
        for k, stage in enumerate(self.stages):
            self.train(number, stage.rounds, train)
            if self.failed(number):
                return worst
            merit = self.merit(number, stage.rounds)
            trial.report(merit, (self.eta or 1) ** k)
            if k + 1 < len(self.stages) and trial.should_prune():
                break
        return merit


def distribution(values: list[Any] | Span) -> optuna.distributions.BaseDistribution:
    """Listed values are proposed by their index: Optuna takes numbers and strings only."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if not isinstance(values, Span):
        return CategoricalDistribution(range(len(values)))
    if values.whole:
        return IntDistribution(int(values.low), int(values.high))
    return FloatDistribution(values.low, values.high, log=True)


def chosen(values: list[Any] | Span, proposed: Any) -> Any:
    return values.rounded(proposed) if isinstance(values, Span) else values[proposed]
