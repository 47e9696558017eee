"""A real server in a process of its own, with a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.process import ServerProcess, write_chat_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="session")
def server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server for all tests that leave it as they found it; sparse, so that it can trace.

    float64: what a token is must not depend on who shares its batch.
    """
    log = tmp_path_factory.mktemp("log") / "requests.jsonl"
    with ServerProcess(model_folder, log, "--dtype=float64", *SPARSE) as running:
        yield running


SPARSE = (
    "--attention-backend=hsa",
    "--page-size=16",
    "--hsa-unit-size=16",
    "--hsa-window=32",
    "--hsa-topk=4",
    "--hsa-dense-below=0",
)
