"""Tokens to text as they come: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from cairn.text.tokenizer import Tokenizer

_CONTEXT = 8  # prompt tokens that precede the output: some tokenizers drop a leading space
_INCOMPLETE = "\ufffd"


class Detokenizer:
    """One request's text. `push` returns what may be shown; `stopped` says a stop string came.

    The text of new tokens is what decoding adds to the tokens just before them, since a token's
    text may depend on its neighbours; a character whose bytes are not all there is waited for.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), prompt_ids: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._ids = list(prompt_ids[-_CONTEXT:])
        self._begin = 0  # decoding starts here ...
        self._known = len(self._ids)  # ... and up to here the text is known
        self._text = ""  # all text of whole characters so far
        self._shown = 0  # characters of it given out
        self.stopped = False

    @property
    def text(self) -> str:
        return self._text[: self._shown]

    def push(self, token_ids: Sequence[int]) -> str:
        if self.stopped:
            return ""
        for token in token_ids:
            self._ids.append(token)
            self._decode(final=False)
        return self._release(self._find_stop())

    def finish(self) -> str:
        """The rest: characters left incomplete, and what looked like a stop string's beginning."""
        if self.stopped:
            return ""
        self._decode(final=True)
        end = self._find_stop()
        return self._release(end if self.stopped else len(self._text))

    def _decode(self, *, final: bool) -> None:
        before = self._tokenizer.decode(self._ids[self._begin : self._known])
        after = self._tokenizer.decode(self._ids[self._begin :])
        if final or (len(after) > len(before) and not after.endswith(_INCOMPLETE)):
            self._text += after[len(before) :]
            self._begin, self._known = self._known, len(self._ids)

    def _find_stop(self) -> int:
        """How much may be shown: up to a stop string, or to what may become one."""
        # A stop string that is complete now cannot begin before what was held back.
        found = [self._text.find(stop, self._shown) for stop in self._stop]
        begins = [at for at in found if at >= 0]
        if begins:
            self.stopped = True
            return min(begins)
        return len(self._text) - max((_overlap(self._text, stop) for stop in self._stop), default=0)

    def _release(self, end: int) -> str:
        piece = self._text[self._shown : end]
        self._shown = max(self._shown, end)
        return piece


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, short of all of it."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
