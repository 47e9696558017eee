from __future__ import annotations

import os

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of tests that run in two processes at once, those of this one."""
    half = os.environ.get("EVERY_OTHER_TEST")
    if half is not None:
        items[:] = items[int(half) :: 2]


@pytest.fixture(autouse=True)
def hurry_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        from tests.kernels.hurried_interpreter import hurry

        hurry(monkeypatch)
