"""Ranks that start at once: copies of a process that has everything imported.

They are processes like any other, and talk over gloo; only the seconds of importing are saved. What
depends on how a process is started asks for `spawned`.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def quick_start() -> Iterator[None]:
    multiprocessing.set_forkserver_preload(
        ["cairn.engine.parallel.rank_process", "tests.parallel.ranks"]
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cairn.engine.parallel.ranks._START_METHOD", "forkserver")
        yield


@pytest.fixture
def spawned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are started as they are everywhere else."""
    monkeypatch.setattr("cairn.engine.parallel.ranks._START_METHOD", "spawn")
