"""Statistics of features by class."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class ClassStatistics(NamedTuple):
    counts: Tensor  # (K,) n_k
    means: Tensor  # (K, d) mean of z over class k; zero where the class is absent
    squares: Tensor  # (K,) mean of ||z||² over class k; zero where the class is absent


def class_statistics(z: Tensor, y: Tensor, classes: int, real: Tensor | None = None) -> ClassStatistics:
    member = F.one_hot(y, classes).to(z.dtype)  # (n, K)
    if real is not None:
        member = member * real[:, None]
    counts = member.sum(0)
    share = member / counts.clamp_min(1)  # (n, K), columns sum to 1
    return ClassStatistics(counts, share.T @ z, share.T @ z.square().sum(1))


def merge_means(means: Tensor, counts: Tensor, previous: Tensor) -> Tensor:
    """(K, d) mean of class means (S, K, d), weighted by counts (S, K); the previous one for classes without samples."""
    total = counts.sum(0)  # (K,)
    merged = torch.einsum("sk,skd->kd", counts / torch.where(total > 0, total, 1), means)
    return torch.where(total[:, None] > 0, merged, previous)
