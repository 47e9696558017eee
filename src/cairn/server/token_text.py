"""The text and bytes of single tokens, for log-probabilities."""

from __future__ import annotations

from functools import lru_cache

from tokenizers import pre_tokenizers

from cairn.text.tokenizer import Tokenizer

_CACHED = 1 << 17


class TokenTexts:
    """A token may be part of a character: then its text is a replacement, its bytes are true."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._bytes = _byte_alphabet(tokenizer)
        self.text = lru_cache(_CACHED)(self._text)
        self.bytes = lru_cache(_CACHED)(self._find_bytes)

    def _text(self, token: int) -> str:
        if self._tokenizer is None:
            return f"token_id:{token}"
        return str(self._tokenizer.fast.decode([token], skip_special_tokens=False))

    def _find_bytes(self, token: int) -> list[int]:
        if self._bytes is not None and self._tokenizer is not None:
            spelling = self._tokenizer.fast.id_to_token(token)
            if spelling is not None and all(c in self._bytes for c in spelling):
                return [self._bytes[c] for c in spelling]
        return list(self.text(token).encode())


def _byte_alphabet(tokenizer: Tokenizer | None) -> dict[str, int] | None:
    """Characters that byte-level tokenizers spell bytes with; None for other tokenizers."""
    if tokenizer is None or "ByteLevel" not in str(tokenizer.fast.decoder):
        return None
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [byte for byte in range(256) if byte not in kept]
    alphabet = {chr(byte): byte for byte in kept}
    alphabet.update({chr(256 + i): byte for i, byte in enumerate(moved)})
    assert set(alphabet) == set(pre_tokenizers.ByteLevel.alphabet())
    return alphabet
