"""Precision of matrix products, in this process."""

from __future__ import annotations

import torch

from coterie.core.errors import CoterieError, unknown

PRECISIONS = ("fp32", "tf32", "bf16")


def set_precision(precision: str, device: torch.device) -> None:
    """Allow or forbid TF32 for float32 matrix products, in this process."""
    if precision not in PRECISIONS:
        raise unknown("precision", precision, PRECISIONS)
    if precision == "tf32" and device.type != "cuda":
        raise CoterieError("precision tf32 needs a GPU; on a CPU use fp32 or bf16")
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
