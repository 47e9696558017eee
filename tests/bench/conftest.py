"""A tiny model with a tokenizer, for all benchmarks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.process import write_chat_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("bench") / "model", model_type="llama")
