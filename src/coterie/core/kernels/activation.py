"""Activations, inside of other kernels."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def activated(value, sign, SLOPE: tl.constexpr):
    """value where sign is positive, else SLOPE times it; of a slope of zero infinity is zero too, as in torch."""
    if SLOPE == 0:
        return tl.where(sign <= 0, 0.0, value)
    else:  # noqa: RET505
        return tl.where(sign > 0, value, value * SLOPE)
