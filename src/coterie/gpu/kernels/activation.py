"""Activations, called by other kernels."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def activated(value, sign, SLOPE: tl.constexpr):
    """value where sign is positive, elsewhere SLOPE times it. A slope of 0 makes -inf zero, as in torch's ReLU."""
    if SLOPE == 0:
        return tl.where(sign <= 0, 0.0, value)
    else:  # noqa: RET505
        return tl.where(sign > 0, value, value * SLOPE)
