from __future__ import annotations

import os
import signal

# A shell has what it runs in the background ignore Ctrl-C, which some tests press.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests run side by side, one process per core: processes that they start take one thread each.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

_SLOW_IS_FINE = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
# The same examples every time: what `make test` says does not depend on chance. `make test-all`
# looks for new ones.
settings.register_profile(
    "ci",
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=_SLOW_IS_FINE,
)
settings.register_profile(
    "thorough", max_examples=5000, deadline=None, suppress_health_check=_SLOW_IS_FINE
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# Tensors of tiny models: threads cost more than they bring. Tests of real models ask for more.
torch.set_num_threads(1)

_MOST_WORKERS = 4  # each needs a gigabyte or two, with the servers that it starts


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Number of processes for `pytest -n auto`: one where tests share a GPU's memory."""
    if torch.cuda.is_available():
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(_MOST_WORKERS, cores or 1)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Random tensors of a test do not depend on the tests before it."""
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, torch finds none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
