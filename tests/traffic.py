"""What each method sends, in numbers: formulas of its paper for a network with b parameters in the encoder and h in
the head, k classes and d features. Up and down, of one client in one round."""

from __future__ import annotations

from collections.abc import Callable

Formula = Callable[[int, int, int, int], int]

NUMBERS: dict[str, tuple[Formula, Formula]] = {
    "local": (lambda b, h, k, d: 0, lambda b, h, k, d: 0),
    "fedavg": (lambda b, h, k, d: b + h + 1, lambda b, h, k, d: b + h),
    "fedper": (lambda b, h, k, d: b + 1, lambda b, h, k, d: b),
    "fedrep": (lambda b, h, k, d: b + 1, lambda b, h, k, d: b),
    "ditto": (lambda b, h, k, d: b + h + 1, lambda b, h, k, d: b + h),
    "fedpac": (lambda b, h, k, d: b + h + 2 * k * d + k + 1, lambda b, h, k, d: b + h + k * d),
}
