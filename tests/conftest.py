from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

torch.set_num_threads(1)
