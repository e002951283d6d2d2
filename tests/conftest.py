from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

torch.set_num_threads(1)

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels for GPUs run, slowly, without one
