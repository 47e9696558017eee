"""Tokens to text as they come: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream

from cairn.text.tokenizer import Tokenizer


class Detokenizer:
    """One request's text. `push` returns what may be shown; `stopped` says a stop string came."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._decoded = ""  # all text of whole characters so far
        self._shown = 0  # characters of it given out
        self.stopped = False

    @property
    def text(self) -> str:
        return self._decoded[: self._shown]

    def push(self, token_ids: Sequence[int]) -> str:
        if self.stopped:
            return ""
        for token in token_ids:
            self._ids.append(token)
            piece = self._stream.step(self._tokenizer.fast, token)
            if piece:
                self._decoded += piece
        return self._release(self._find_stop())

    def finish(self) -> str:
        """The rest: characters left incomplete, and what looked like a stop string's beginning."""
        if self.stopped:
            return ""
        whole = self._tokenizer.decode(self._ids)
        if whole.startswith(self._decoded):
            self._decoded = whole
        end = self._find_stop()
        return self._release(end if self.stopped else len(self._decoded))

    def _find_stop(self) -> int:
        """How much may be shown: up to a stop string, or to what may become one."""
        # A stop string that is complete now cannot begin before what was held back.
        found = [self._decoded.find(stop, self._shown) for stop in self._stop]
        begins = [at for at in found if at >= 0]
        if begins:
            self.stopped = True
            return min(begins)
        return len(self._decoded) - max(
            (_overlap(self._decoded, stop) for stop in self._stop), default=0
        )

    def _release(self, end: int) -> str:
        piece = self._decoded[self._shown : end]
        self._shown = max(self._shown, end)
        return piece


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, short of all of it."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
