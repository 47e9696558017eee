from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import TINY_LLAMA, byte_tokenizer, write_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama of bytes."""
    path = tmp_path_factory.mktemp("eval-model")
    config = {**TINY_LLAMA, "vocab_size": 256, "max_position_embeddings": 4096}
    write_model(path, {**config, "model_type": "llama"})
    byte_tokenizer().save(str(path / "tokenizer.json"))
    return path
