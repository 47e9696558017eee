"""Following a grammar in the engine: which tokens may come next."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache

from llguidance import LLMatcher, LLTokenizer

from cairn.errors import RequestError
from cairn.text.tokenizer import Tokenizer

_CACHED = 64  # compiled grammars

_log = logging.getLogger("cairn.server.engine")


class Matchers:
    """Compiles grammars, and makes a follower for each choice. Used from one thread."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: frozenset[int]) -> None:
        if not ends:
            raise RequestError(
                "response_format and tools need a model with an end token, and this one has none"
            )
        self._ends = sorted(ends)
        self._tokens = LLTokenizer(
            tokenizer.fast.to_str(), n_vocab=vocab_size, eos_token=self._ends
        )
        self._fresh = lru_cache(_CACHED)(self._compile)
        only_ends = bytearray(-(-vocab_size // 8))
        for token in self._ends:
            only_ends[token // 8] |= 1 << token % 8
        self._only_ends = bytes(only_ends)

    def make(self, grammar: str) -> Follower:
        return Follower(self._fresh(grammar).deep_copy(), self._only_ends)

    def _compile(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._tokens, grammar, log_level=0)
        if matcher.is_error():
            raise RequestError(f"the grammar cannot be followed: {matcher.get_error()[:500]}")
        return matcher


class Follower:
    """Where a choice is in its grammar. If the library fails, the text has to end."""

    def __init__(self, matcher: LLMatcher, only_ends: bytes) -> None:
        self._matcher = matcher
        self._only_ends = only_ends
        self._taken = 0

    def __call__(self, output_ids: Sequence[int]) -> bytes:
        new = list(output_ids[self._taken :])
        self._taken = len(output_ids)
        try:
            mask = self._advance(new)
        except BaseException as error:  # a panic of the library is no Exception
            if type(error).__name__ != "PanicException":
                raise
            _log.warning("a grammar was given up: %s", error)
            mask = b""
        return mask if any(mask) else self._only_ends

    def _advance(self, new: list[int]) -> bytes:
        """Mask of the tokens allowed after the new ones; empty after a failure."""
        if new:
            self._matcher.consume_tokens(new)
        if self._matcher.is_error():
            _log.warning("a grammar was given up: %s", self._matcher.get_error()[:500])
            return b""
        mask: bytes = self._matcher.compute_bitmask()
        return mask
