"""Settings of the whole process."""

from __future__ import annotations

import sys

import pytest
import torch

from coterie.execution import Stacked
from tests import toy


@pytest.mark.skipif(sys.platform != "linux", reason="the allocator of glibc")
def test_stacked_clients_keep_freed_memory() -> None:
    """Each page that the system hands out again is a fault, 4096 of them in 16 MB."""
    import resource

    Stacked(toy.method("fedavg"), toy.model(), toy.toy(), 0)
    torch.ones(2**22)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        torch.ones(2**22)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 4096
