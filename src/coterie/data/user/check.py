"""Check users' data: what they contain, and what is wrong with them."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from coterie.core.data import Transform
from coterie.core.errors import some_of
from coterie.core.printable import printable
from coterie.data.describe import SHOWN, input_lines
from coterie.data.statistics import fitted
from coterie.data.user.leaks import look_for_leaks
from coterie.data.user.pooled import Pooled
from coterie.data.user.read import located, pooled_at
from coterie.data.user.reading import Array, Notes, Problem, Reading
from coterie.data.user.several_inputs import has_fields, inputs_of
from coterie.data.user.split import digests

REPEATED = "test sample that equals a training sample; leave one of them out, unless they are different cases"
FAR = 20.0  # values beyond this are hard to learn from
SHADES = " .:-=+*#%@"  # from no samples to the most
WIDTH, HEIGHT = 60, 20  # classes and clients shown in a picture


@dataclass(frozen=True)
class Report:
    path: str
    form: str
    task: str
    guessed: bool  # whether the task is guessed from the labels
    clients: tuple[str, ...]
    classes: tuple[str, ...]
    shape: tuple[int, ...]  # of one sample
    dtype: str
    low: float
    high: float
    train: int
    test: int
    split: str  # how training and test samples were separated
    columns: tuple[str, ...]  # of a table
    input: tuple[str, ...]  # description of a sample and its preprocessing
    counts: Array  # (m, K) samples of each class on each client, train and test together
    problems: list[Problem]

    @property
    def fine(self) -> bool:
        return not any(problem.stops for problem in self.problems)

    def as_json(self) -> dict[str, Any]:
        values = {k: v for k, v in vars(self).items() if k not in ("counts", "problems")}
        return {
            **values,
            "fine": self.fine,
            "counts": self.counts.tolist(),
            "problems": [asdict(problem) for problem in self.problems],
        }


def check(path: str | os.PathLike[str], reading: Reading | None = None) -> Report:
    """Read all data and report problems. Raises CoterieError if they cannot be read at all."""
    reading, notes = reading or Reading(), Notes()
    pooled = pooled_at(located(path), reading, notes)
    repeated(pooled, notes)
    if not has_fields(pooled.x):
        look_for_leaks(pooled, notes)
    known = pooled.strata >= 0
    classes = pooled.classes if pooled.task.one_class else ("samples",)
    counts = np.zeros((len(pooled.clients), len(classes)), np.int64)
    np.add.at(counts, (pooled.owner[known], pooled.strata[known]), 1)
    numbers = [at for at, column in enumerate(pooled.columns) if not column.categories]  # others hold codes
    low, high = value_range(pooled.x if len(numbers) == len(pooled.columns) else pooled.x[:, numbers])
    if pooled.x.dtype.kind == "f" and max(-low, high) > FAR:
        notes.worth_knowing("values far from 0 are hard to learn from; train with --normalise auto", f"up to {high:g}")
    return Report(
        path=str(path),
        form=pooled.form,
        task=pooled.task.name,
        guessed=reading.task is None,
        clients=pooled.clients,
        classes=pooled.classes if pooled.task.one_class else (),
        shape=pooled.shape,
        dtype="uint8" if has_fields(pooled.x) else str(pooled.x.dtype),
        low=low,
        high=high,
        train=int((~pooled.test).sum()),
        test=int(pooled.test.sum()),
        split=split_in_words(pooled, reading),
        columns=tuple(column.name for column in pooled.columns),
        input=understood(pooled, reading),
        counts=counts,
        problems=sorted(notes.problems.values(), key=lambda problem: not problem.stops),
    )


def understood(pooled: Pooled, reading: Reading) -> tuple[str, ...]:
    """The description that a run with these settings prints, if the data allow a run."""
    transform = Transform(columns=pooled.columns)
    train = pooled.x[~pooled.test]
    if reading.missing == "median" and pooled.columns and len(train) and pooled.x.dtype.kind == "f":
        x = torch.from_numpy(train)
        there = [column for at, column in enumerate(pooled.columns) if not x[:, at].isnan().all()]
        if len(there) == len(pooled.columns):
            made = tuple(fitted(column, x[:, at]) for at, column in enumerate(pooled.columns))
            transform = replace(transform, columns=made)
    if has_fields(pooled.x):
        return (*input_lines(pooled.shape, torch.uint8, Transform(inputs=inputs_of(pooled.x))), *pooled.done)
    kind = torch.from_numpy(pooled.x[:0]).dtype
    return (*input_lines(pooled.shape, kind, transform), *pooled.done)


def split_in_words(pooled: Pooled, reading: Reading) -> str:
    if not pooled.divided:
        return "by the data's own split"
    whole = ", whole groups" if pooled.group is not None else ""
    by_class = " and class" if pooled.task.one_class else ""
    return f"set aside at random by client{by_class}{whole}, seed {reading.split_seed}"


def value_range(x: Array) -> tuple[float, float]:
    """Smallest and largest finite value, of all inputs."""
    if has_fields(x):
        low, high = zip(*(value_range(x[name]) for name in x.dtype.names or ()), strict=True)
        return min(low), max(high)
    fine = x if x.dtype.kind != "f" else x[np.isfinite(x)]
    return (float(fine.min()), float(fine.max())) if fine.size else (0.0, 0.0)


def repeated(pooled: Pooled, notes: Notes) -> None:
    """Report test samples that equal a training sample of any client, byte for byte."""
    known = digests(pooled.x)
    train, test = np.flatnonzero(~pooled.test), np.flatnonzero(pooled.test)
    first = {digest.tobytes(): int(i) for digest, i in zip(known[train], train, strict=True)}
    twin = {i: at for i in test.tolist() if (at := first.get(known[i].tobytes())) is not None}
    rows = np.array(list(twin), np.int64)
    notes.wrong_at(REPEATED, rows, lambda i: f"{pooled.place(i)} is {pooled.place(twin[i])}", stops=False)


def lines(report: Report) -> list[str]:
    """The report as text, on one screen."""
    samples = f"{report.train + report.test:,} samples"
    sides = f"{report.train:,} to train, {report.test:,} to test"
    totals = report.counts.sum(0).tolist()
    classes = [f"{name} {total:,}" for name, total in zip(report.classes, totals, strict=False)]
    hint = ", guessed from the labels; --task names another" if report.guessed else ""
    text = [
        f"{report.path}: {report.form}",
        f"  {len(report.clients):,} clients, {samples}: {sides} ({report.split})",
        f"  task: {report.task}{hint}",
        *([f"  {len(report.classes):,} classes: {some_of(classes, SHOWN)}"] if report.classes else []),
        *(f"  {line}" for line in report.input),
        f"  values: {report.low:g} to {report.high:g}",
        "",
        *picture(report),
        "",
        *(line for problem in report.problems for line in problem_lines(problem)),
        "No errors found." if report.fine else "Fix what is marked with ! before training.",
    ]
    return [printable(line) for line in text]


def picture(report: Report) -> list[str]:
    """One line per client, one character per class: the darker, the more samples."""
    counts = report.counts[:HEIGHT, :WIDTH]
    most = max(1, int(report.counts.max(initial=0)))
    level = np.ceil(counts / most * (len(SHADES) - 1)).astype(int)
    wide = min(30, max(len(name) for name in report.clients[:HEIGHT]))
    rows = [
        f"  {name[:30]:>{wide}} |{''.join(SHADES[i] for i in own)}| {int(total):,}"
        for name, own, total in zip(report.clients, level, report.counts.sum(1), strict=False)
    ]
    left = len(report.clients) - HEIGHT
    hidden = [f"  ... and {left:,} more clients"] if left > 0 else []
    cut = f" (the first {WIDTH})" if len(report.classes) > WIDTH else ""
    what = f"Samples of each class{cut}" if report.classes else "Samples"
    return [f"  {what} on each client; {SHADES[-1]} is {most:,}:", *rows, *hidden]


def problem_lines(problem: Problem) -> list[str]:
    more = problem.count - len(problem.examples)
    examples = [f"    {where}" for where in problem.examples] + [f"    and {more:,} more"] * (more > 0)
    return [f"{'!' if problem.stops else '-'} {problem.what} ({problem.count:,})", *examples]
