from __future__ import annotations

import os

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of tests that run in two processes at once, those of this one."""
    half = os.environ.get("EVERY_OTHER_TEST")
    if half is not None:
        items[:] = items[int(half) :: 2]
