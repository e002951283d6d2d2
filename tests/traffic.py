"""What each method sends, in numbers: formulas of its paper for a network with b parameters in the encoder and h in
the head, k classes and d features. Up and down, of one client in one round."""

from __future__ import annotations

from collections.abc import Callable

Formula = Callable[[int, int, int, int], int]

NUMBERS: dict[str, tuple[Formula, Formula]] = {
    "local": (lambda b, h, k, d: 0, lambda b, h, k, d: 0),
    "fedavg": (lambda b, h, k, d: b + h + 1, lambda b, h, k, d: b + h),
    "fedavgm": (lambda b, h, k, d: b + h + 1, lambda b, h, k, d: b + h),
    "fedopt": (lambda b, h, k, d: b + h + 1, lambda b, h, k, d: b + h),
    "fednova": (lambda b, h, k, d: b + h, lambda b, h, k, d: b + h),
    "fedprox": (lambda b, h, k, d: b + h + 1, lambda b, h, k, d: b + h),
    "moon": (lambda b, h, k, d: b + h + 1, lambda b, h, k, d: b + h),
    "scaffold": (lambda b, h, k, d: 2 * (b + h), lambda b, h, k, d: 2 * (b + h)),
    "feddyn": (lambda b, h, k, d: b + h, lambda b, h, k, d: b + h),
    "fedper": (lambda b, h, k, d: b + 1, lambda b, h, k, d: b),
    "fedrep": (lambda b, h, k, d: b + 1, lambda b, h, k, d: b),
    "lg-fedavg": (lambda b, h, k, d: h + 1, lambda b, h, k, d: h),
    "fedalt": (lambda b, h, k, d: b + 1, lambda b, h, k, d: b),
    "fedsim": (lambda b, h, k, d: b + 1, lambda b, h, k, d: b),
    "fedbn": (lambda b, h, k, d: b + h + 1, lambda b, h, k, d: b + h),  # of a network without normalization layers
    "fedbabu": (lambda b, h, k, d: b + 1, lambda b, h, k, d: b),
    "fedrod": (lambda b, h, k, d: b + h + 1, lambda b, h, k, d: b + h),
    "feddbe": (lambda b, h, k, d: b + h + d + 1, lambda b, h, k, d: b + h + d),
    "fedcp": (lambda b, h, k, d: b + h + 2 * d * d + 6 * d + 1, lambda b, h, k, d: b + h + 2 * d * d + 6 * d),
    "per-fedavg": (lambda b, h, k, d: b + h + 1, lambda b, h, k, d: b + h),
    "knn-per": (lambda b, h, k, d: b + h + 1, lambda b, h, k, d: b + h),
    "apfl": (lambda b, h, k, d: b + h + 1, lambda b, h, k, d: b + h),
    "fedala": (lambda b, h, k, d: b + h + 1, lambda b, h, k, d: b + h),
    "pfedme": (lambda b, h, k, d: b + h + 1, lambda b, h, k, d: b + h),
    "ditto": (lambda b, h, k, d: b + h + 1, lambda b, h, k, d: b + h),
    "fedfomo": (lambda b, h, k, d: b + h + 5, lambda b, h, k, d: 5 * (b + h)),  # M = 5 models
    "fedamp": (lambda b, h, k, d: b + h, lambda b, h, k, d: b + h),
    "pfedhn": (lambda b, h, k, d: b + h, lambda b, h, k, d: b + h),
    "hypcluster": (lambda b, h, k, d: b + h + 2, lambda b, h, k, d: 5 * (b + h)),
    "fedem": (lambda b, h, k, d: 3 * (b + h) + 1, lambda b, h, k, d: 3 * (b + h)),
    "fedproto": (lambda b, h, k, d: k * d + k, lambda b, h, k, d: k * d),
    "gpfl": (lambda b, h, k, d: b + k * d + 2 * d * d + 6 * d + 1, lambda b, h, k, d: b + k * d + 2 * d * d + 6 * d),
    "fedpac": (lambda b, h, k, d: b + h + 2 * k * d + k + 1, lambda b, h, k, d: b + h + k * d),
    "fedpac-proto": (lambda b, h, k, d: b + h + k * d + k, lambda b, h, k, d: b + h + k * d),
    "fedreg": (lambda b, h, k, d: b + h + 2, lambda b, h, k, d: b + h),
    "fedcrc": (lambda b, h, k, d: b + h + 1, lambda b, h, k, d: b + h),
    "pfakd": (lambda b, h, k, d: b + 1, lambda b, h, k, d: b),
    "mr-mtl": (lambda b, h, k, d: b + h, lambda b, h, k, d: b + h),
    "fedlc": (lambda b, h, k, d: b + h + 1, lambda b, h, k, d: b + h),
    "fedntd": (lambda b, h, k, d: b + h + 1, lambda b, h, k, d: b + h),
    "fedphp": (lambda b, h, k, d: b + h + 1, lambda b, h, k, d: b + h),
    "fedcac": (lambda b, h, k, d: b + h + (b + h) // 4 + 1, lambda b, h, k, d: b + h),
    "apple": (lambda b, h, k, d: b + h, lambda b, h, k, d: 5 * (b + h) + 2),  # m = 5 clients
    "fedas": (lambda b, h, k, d: b + 1, lambda b, h, k, d: b),
    "pfedfda": (lambda b, h, k, d: b + k * d + d * d + 1, lambda b, h, k, d: b + k * d + d * d),
    "cfl": (lambda b, h, k, d: b + h + 1, lambda b, h, k, d: b + h),
    "q-fedavg": (lambda b, h, k, d: b + h + 2, lambda b, h, k, d: b + h),
    "afl": (lambda b, h, k, d: b + h + 1, lambda b, h, k, d: b + h),
    "fedsam": (lambda b, h, k, d: b + h + 1, lambda b, h, k, d: b + h),
    "fedgh": (lambda b, h, k, d: k * d + k, lambda b, h, k, d: h),
    "fedtgp": (lambda b, h, k, d: k * d + k, lambda b, h, k, d: k * d),
    "fml": (lambda b, h, k, d: b + h + 1, lambda b, h, k, d: b + h),
    "fedgen": (lambda b, h, k, d: b + h + k, lambda b, h, k, d: b + h + 256 * (33 + k) + 257 * d + k),
    "superfed": (lambda b, h, k, d: b + h + 1, lambda b, h, k, d: b + h + 1),
    "pfedla": (lambda b, h, k, d: b + h, lambda b, h, k, d: b + h),
    "floco": (lambda b, h, k, d: b + 10 * h + 1, lambda b, h, k, d: b + 10 * h + 11),  # M = 10 vertices
}
