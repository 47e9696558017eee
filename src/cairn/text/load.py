"""The tokenizer that belongs to a model, wherever the model comes from."""

from __future__ import annotations

from cairn.models.source import ModelSource
from cairn.text.gguf_tokenizer import tokenizer_from_gguf
from cairn.text.tokenizer import Tokenizer


def load_tokenizer(source: ModelSource) -> Tokenizer | None:
    """None if the model has none; it then accepts only token ids."""
    if source.gguf is not None:
        return tokenizer_from_gguf(source.gguf.metadata, source.gguf.path)
    return None if source.folder is None else Tokenizer.from_folder(source.folder)
