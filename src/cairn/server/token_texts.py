"""Text and bytes of single tokens, for log-probabilities and traces."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

from tokenizers import pre_tokenizers

from cairn.engine.logprobs import TokenLogprob
from cairn.text.tokenizer import Tokenizer

_CACHED_TOKENS = 1 << 17


class TokenTexts:
    """The text of a partial character is a replacement."""

    def __init__(self, tokenizer: Tokenizer | None, ends: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        self.ends = frozenset(ends)
        """The model's own end tokens."""
        self._alphabet = byte_alphabet(tokenizer)
        self.text = lru_cache(_CACHED_TOKENS)(self._text)
        self.bytes = lru_cache(_CACHED_TOKENS)(self._find_bytes)

    def scored(self, scores: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        """Tokens with their log-probabilities, as chats and responses tell them."""
        return [
            {
                **self._entry(score.token_id, score.logprob),
                "top_logprobs": [self._entry(*each) for each in score.top],
            }
            for score in scores
        ]

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self.text(token), "logprob": logprob, "bytes": self.bytes(token)}

    def _text(self, token: int) -> str:
        if self._tokenizer is None:
            return f"token_id:{token}"
        return str(self._tokenizer.fast.decode([token], skip_special_tokens=False))

    def _find_bytes(self, token: int) -> list[int]:
        if self._alphabet is not None and self._tokenizer is not None:
            spelling = self._tokenizer.fast.id_to_token(token)
            if spelling is not None and all(c in self._alphabet for c in spelling):
                return [self._alphabet[c] for c in spelling]
        return list(self.text(token).encode())


def byte_alphabet(tokenizer: Tokenizer | None) -> dict[str, int] | None:
    """The character that byte-level tokenizers write for each byte; None for other tokenizers."""
    if tokenizer is None or "ByteLevel" not in str(tokenizer.fast.decoder):
        return None
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [byte for byte in range(256) if byte not in kept]
    alphabet = {chr(byte): byte for byte in kept}
    alphabet.update({chr(256 + i): byte for i, byte in enumerate(moved)})
    assert set(alphabet) == set(pre_tokenizers.ByteLevel.alphabet())
    return alphabet
