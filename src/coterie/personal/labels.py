"""Map the labels of a user's file to the classes of a run, by name or by --labels."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.core.errors import CoterieError, unknown

IN_ORDER = "in-order"
MISSING = str(np.iinfo(np.int64).min)  # marks a missing number
SIGNIFICANT = 1e-3  # p-value below which a model is worse than chance
SHOWN = 12  # classes in a message


@dataclass(frozen=True)
class LabelMapping:
    """What the labels of a file mean; by default, they are class names."""

    mapping: Mapping[str, str] = field(default_factory=dict)  # label in the file -> class of the run
    in_order: bool = False  # whether label 0 is the first class of the run, 1 the second, ...

    @staticmethod
    def parse(text: str | None) -> LabelMapping:
        """Parse 0=healthy,1=disease or in-order."""
        if text is None:
            return LabelMapping()
        if text == IN_ORDER:
            return LabelMapping(in_order=True)
        pairs = [pair.partition("=") for pair in text.split(",")]
        if not all(label.strip() and name.strip() for label, _, name in pairs):
            raise CoterieError(
                f"--labels must be {IN_ORDER}, or LABEL=CLASS,... such as 0=healthy,1=disease; got '{text}'"
            )
        keys = [label.strip() for label, _, _ in pairs]
        if len(set(keys)) < len(keys):
            raise CoterieError(f"--labels names '{max(keys, key=keys.count)}' twice")
        return LabelMapping({label.strip(): name.strip() for label, _, name in pairs})

    def classes(self, raw: NDArray[Any], names: Sequence[str], where: str) -> Tensor:
        """(N,) int64 class numbers of the labels; an unknown label is an error."""
        texts, at = np.unique(raw.astype(str), return_inverse=True)
        if {"", MISSING} & set(texts.tolist()):
            raise CoterieError(f"{where}: some samples have no label")
        found = torch.tensor([self.position(text, names, where, texts.tolist()) for text in texts.tolist()])
        return found[torch.from_numpy(at.reshape(-1))]

    def position(self, text: str, names: Sequence[str], where: str, texts: Sequence[str]) -> int:
        if self.in_order:
            if not is_integer(text) or not 0 <= int(text) < len(names):
                raise CoterieError(
                    f"{where}: with --labels {IN_ORDER}, labels must be 0 to {len(names) - 1}, got '{text}'"
                )
            return int(text)
        if self.mapping and text not in self.mapping:
            raise CoterieError(f"{where}: --labels does not map '{text}'; labels in the file: {', '.join(texts)}")
        name = self.mapping.get(text, text)
        if name in names:
            return list(names).index(name)
        if not self.mapping and is_integer(text) and not all(map(is_integer, names)):
            raise CoterieError(f"{where}: {as_numbers(names, texts)}")
        raise CoterieError(f"{where}: {unknown('class', name, names)}")


def as_numbers(names: Sequence[str], texts: Sequence[str]) -> str:
    """The error for numeric labels where classes have names."""
    more = ", ..." if len(names) > SHOWN else ""
    known = ", ".join(names[:SHOWN]) + more
    pairs = ",".join(f"{k}={name}" for k, name in enumerate(names[:SHOWN]))
    in_order = f"--labels {pairs}" if not more else f"--labels {IN_ORDER}"
    return (
        f"labels are {', '.join(texts[:SHOWN])}, but the classes of this run are {known}. "
        f"If numbers follow that order, pass {in_order}; otherwise name each, as in --labels 1={names[0]},..."
    )


def is_integer(text: str) -> bool:
    return re.fullmatch(r"-?[0-9]+", text) is not None


@dataclass(frozen=True)
class Chance:
    """A model's accuracy on labelled samples, compared with guessing."""

    correct: int
    total: int
    classes: int

    @property
    def below(self) -> bool:
        """Whether the accuracy is significantly below guessing, by a binomial test."""
        return self.p_value < SIGNIFICANT

    @property
    def p_value(self) -> float:
        """The probability that guessing gets this many right or fewer."""
        if not self.total or self.correct * self.classes >= self.total:
            return 1.0
        n, k = torch.tensor(float(self.total)).double(), torch.arange(self.correct + 1).double()
        ways = torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
        share = torch.tensor(1 / self.classes).double()
        return float((ways + k * share.log() + (n - k) * (1 - share).log()).logsumexp(0).exp())

    def warning(self, whose: str, names: Sequence[str], labels: LabelMapping) -> str:
        pairs = labels.mapping or {str(k): name for k, name in enumerate(names) if labels.in_order}
        taken = ", ".join(f"{label} = {name}" for label, name in list(pairs.items())[:SHOWN])
        return (
            f"{whose} is right for {self.correct} of {self.total} samples, far below guessing "
            f"({100 / self.classes:.0f} %, p = {self.p_value:.0e}): do the labels have the same meaning as in training?"
            + (f" They were taken as {taken}." if taken else "")
        )
