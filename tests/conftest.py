from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ["HF_HUB_OFFLINE"] = os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"  # no test asks a server

import pytest
import torch

import tests.shipped  # noqa: F401 - the included images are decompressed once
from tests.skips import pytest_make_collect_report, pytest_runtest_makereport, pytest_runtest_setup

__all__ = ["pytest_make_collect_report", "pytest_runtest_makereport", "pytest_runtest_setup"]  # hooks

torch.set_num_threads(1)

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels for GPUs run, slowly, without one

for asking in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a shell may have us ignore them; tests send them
    if signal.getsignal(asking) == signal.SIG_IGN:
        signal.signal(asking, signal.default_int_handler if asking == signal.SIGINT else signal.SIG_DFL)


@pytest.fixture(autouse=True)
def _handlers_are_removed() -> Iterator[None]:
    """A handler that a run leaves behind writes the lines of later runs into its own file."""
    logger = logging.getLogger("coterie")
    before = list(logger.handlers)
    yield
    left = [handler for handler in logger.handlers if handler not in before]
    logger.handlers[:] = before
    assert not left, left
