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
    Where tokens are bytes, a token that follows a whole character and ends with one has a text of
    its own, which the tokenizer keeps.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), prompt_ids: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        # Tokens to decode together; empty where the next one can be decoded alone.
        self._ids = list(prompt_ids[-_CONTEXT:])
        self._known = len(self._ids)  # up to here their text is known
        self._shown: list[str] = []
        self._held = ""  # text of whole characters that is not shown yet
        self.stopped = False

    @property
    def text(self) -> str:
        return "".join(self._shown)

    def push(self, token_ids: Sequence[int]) -> str:
        if self.stopped:
            return ""
        for token in token_ids:
            if not self._ids and self._tokenizer.decodes_apart:
                text = self._tokenizer.token_text(token)
                if not text.endswith(_INCOMPLETE):
                    self._held += text
                    continue
            self._ids.append(token)
            self._decode(final=False)
        return self._release(final=False)

    def finish(self) -> str:
        """The rest: characters left incomplete, and what looked like a stop string's beginning."""
        if self.stopped:
            return ""
        self._decode(final=True)
        return self._release(final=True)

    def _decode(self, *, final: bool) -> None:
        before = self._tokenizer.decode(self._ids[: self._known])
        after = self._tokenizer.decode(self._ids)
        if final or (len(after) > len(before) and not after.endswith(_INCOMPLETE)):
            self._held += after[len(before) :]
            # What was just decoded is what the next token follows, if that matters.
            del self._ids[: len(self._ids) if self._tokenizer.decodes_apart else self._known]
            self._known = len(self._ids)

    def _release(self, *, final: bool) -> str:
        """What may be shown: up to a stop string, or to what may become one."""
        end = len(self._held)
        if self._stop:
            # A stop string that is complete now cannot begin before what was held back.
            found = [self._held.find(stop) for stop in self._stop]
            begins = [at for at in found if at >= 0]
            if begins:
                self.stopped = True
                end = min(begins)
            elif not final:
                end -= max(_overlap(self._held, stop) for stop in self._stop)
        piece, self._held = self._held[:end], self._held[end:]
        self._shown.append(piece)
        return piece


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, short of all of it."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
