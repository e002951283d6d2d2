"""Statistics of features by class."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.core.batch import Data
from coterie.core.data import Transform

PRESENT = 1e-6  # smallest share of a client's samples in a class that it has; noise on counts leaves less elsewhere


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


def vectors(z: Tensor, axis: int) -> Tensor:
    """(B, d) one vector of features for each sample, from features z (B, ...): the mean over its tokens or pixels.

    axis: along which the vectors lie in z, `model.feature_axis`.
    """
    return z.movedim(axis, -1).reshape(len(z), -1, z.shape[axis]).mean(1)


def present(counts: Tensor) -> Tensor:
    """(S, K) whether a client has samples of a class, by counts (S, K)."""
    return counts > PRESENT * counts.sum(1, keepdim=True)


def class_samples(means: Tensor, counts: Tensor, key: Tensor) -> Data:
    """The class means (S, K, d) of clients as samples to train on, each with its class as label.

    Classes that a client lacks, by its counts (S, K), are padding.
    """
    clients, classes, d = means.shape
    y = torch.arange(classes, device=means.device).repeat(clients)
    rate = torch.ones((), dtype=means.dtype, device=means.device)
    real = present(counts).flatten()
    return Data(means.reshape(-1, d), y, key, rate, classes, Transform(), real, alone=True)
