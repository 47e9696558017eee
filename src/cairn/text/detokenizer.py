"""Turns tokens into text as they come: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from cairn.text.stop_strings import StopStrings
from cairn.text.tokenizer import Tokenizer

_CONTEXT = 8  # prompt tokens that precede the output: some tokenizers drop a leading space
_INCOMPLETE = "\ufffd"


class Detokenizer:
    """The text of one request. `push` returns what may be shown.

    The text of new tokens is what they add when decoded together with the tokens just before them,
    since a token's text may depend on its neighbours. An incomplete character waits for its other
    bytes. With a byte-level tokenizer, a token that follows a whole character and ends with one is
    decoded alone, and the tokenizer caches its text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: StopStrings | None = None,
        prompt_ids: Sequence[int] = (),
        *,
        keep_stop: bool = False,
    ) -> None:
        """`keep_stop`: the stop string is part of the text."""
        self._tokenizer = tokenizer
        self._keep_stop = keep_stop
        self._stop = stop or StopStrings()
        self._matched = self._stop.start()
        self._searched = 0  # characters of the held text in which no stop string is complete
        # Tokens to decode together; empty if the next one can be decoded alone.
        self._ids = list(prompt_ids[-_CONTEXT:])
        self._known = len(self._ids)  # number of them whose text is known
        self._shown: list[str] = []
        self._held = ""  # whole characters that are not shown yet
        self.matched: str | None = None  # the stop string that is complete

    @property
    def stopped(self) -> bool:
        return self.matched is not None

    @property
    def text(self) -> str:
        return "".join(self._shown)

    def push(self, token_ids: Sequence[int]) -> str:
        if self.stopped:
            return ""
        for token in token_ids:
            if not self._ids and self._tokenizer.is_byte_level:
                text = self._tokenizer.token_text(token)
                if not text.endswith(_INCOMPLETE):
                    self._held += text
                    continue
            self._ids.append(token)
            self._decode(final=False)
        return self._release(final=False)

    def finish(self) -> str:
        """The rest: incomplete characters, and text that could have begun a stop string."""
        if self.stopped:
            return ""
        self._decode(final=True)
        return self._release(final=True)

    def _decode(self, *, final: bool) -> None:
        before = self._tokenizer.decode(self._ids[: self._known])
        after = self._tokenizer.decode(self._ids)
        if final or (len(after) > len(before) and not after.endswith(_INCOMPLETE)):
            self._held += after[len(before) :]
            # Keep what was just decoded if the next token's text depends on it.
            del self._ids[: len(self._ids) if self._tokenizer.is_byte_level else self._known]
            self._known = len(self._ids)

    def _release(self, *, final: bool) -> str:
        """The held text up to a stop string, or up to what may become one."""
        end = len(self._held)
        if self._stop:
            old = self._searched
            found = self._stop.find(self._held[old:], self._matched)
            if found is not None:
                begin, end = old + found[0], old + found[1]
                self.matched = self._held[begin:end]
                end = end if self._keep_stop else begin
            elif not final:
                end -= max(self._matched)
            self._searched = len(self._held) - end
        piece, self._held = self._held[:end], self._held[end:]
        self._shown.append(piece)
        return piece


def overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
