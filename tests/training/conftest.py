from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from training.cli import make_worlds
from training.tasks import World
from training.text import load_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer()


@pytest.fixture(scope="session")
def worlds(tokenizer: Tokenizer) -> tuple[World, World]:
    """To train in, and held out."""
    return make_worlds(tokenizer, names=400)


@pytest.fixture(scope="session")
def world(worlds: tuple[World, World]) -> World:
    return worlds[0]
