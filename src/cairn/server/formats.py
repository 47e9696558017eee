"""Answers in OpenAI's words: chunks of a stream, or the whole.

An event that is only text, which most are, is two constants of its choice around the text. Others
are plain dicts, which msgspec writes. The page map's data travel in a field `cairn` of each choice.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from cairn.engine.logprobs import TokenLogprob
from cairn.server.answer import Ended, Piece
from cairn.server.token_text import TokenTexts
from cairn.server.tools import ToolParser
from cairn.server.wire import Ready
from cairn.trace import TokenReads

_encode = msgspec.json.Encoder().encode
_TEXT = "\0"  # stands for the text in an event that is written in advance


@dataclass(slots=True)
class Said:
    """What one choice has said so far; of a stream, what its next event needs."""

    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reads: list[dict[str, Any]] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    ended: Ended | None = None
    offset: int = 0  # characters, for completions' text_offset
    around: tuple[bytes, bytes] = (b"", b"")  # an event's bytes before and after its text
    echo: str = ""  # what its first event says before its text


@dataclass(frozen=True, slots=True)
class PageTexts:
    """The prompt as the page map draws it."""

    texts: list[str]
    prompt_tokens: int
    engine: Ready

    def as_dict(self) -> dict[str, Any]:
        return {
            "page_size": self.engine.page_size,
            "tokens_per_page": self.engine.tokens_per_page,
            "sparse_layers": self.engine.sparse_layers,
            "prompt_tokens": self.prompt_tokens,
            "texts": self.texts,
        }


class _Format:
    kind = ""

    def __init__(
        self,
        answer_id: str,
        model: str,
        choices: int,
        texts: TokenTexts,
        *,
        prompts: int = 1,
        streams: bool = False,
        with_usage: bool = False,
        pages: PageTexts | None = None,
    ) -> None:
        self.streams = streams
        self.choices = [Said() for _ in range(choices)]
        self._texts = texts
        self._prompts = prompts
        self._with_usage = with_usage
        self._pages = pages
        self._head = {"id": answer_id, "created": int(time.time()), "model": model}
        for index, choice in enumerate(self.choices if streams else ()):
            event = _event(self._chunk(self._text_choice(index, _TEXT)))
            # What follows the text is not the client's: it cannot look like the text's place.
            before, _, after = event.rpartition(_encode(_TEXT))
            choice.around = before, after

    def _text_choice(self, index: int, text: str) -> dict[str, Any]:
        """A chunk's choice that says `text` and no more."""
        raise NotImplementedError

    # -- tokens -------------------------------------------------------------------------------

    def add_text(self, index: int, text: str) -> bytes:
        choice = self.choices[index]
        if not self.streams:
            choice.text.append(text)
            return b""
        if choice.echo:
            text, choice.echo = choice.echo + text, ""
        if not text:
            return b""
        before, after = choice.around
        return before + _encode(text) + after

    # -- usage --------------------------------------------------------------------------------

    def usage(self) -> dict[str, Any]:
        """Choices of one prompt share its tokens."""
        each = len(self.choices) // self._prompts
        firsts = [choice.ended for choice in self.choices[::each] if choice.ended is not None]
        prompt = sum(ended.prompt_tokens for ended in firsts)
        cached = sum(ended.cached_tokens for ended in firsts)
        all_ended = [choice.ended for choice in self.choices if choice.ended is not None]
        completion = sum(ended.completion_tokens for ended in all_ended)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def last(self) -> bytes:
        if not self._with_usage:
            return b""
        return _event({**self._chunk_head(), "choices": [], "usage": self.usage()})

    def _chunk_head(self) -> dict[str, Any]:
        return {**self._head, "object": f"{self.kind}.chunk"}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self._chunk_head(), "choices": [choice]}
        if self._with_usage:
            chunk["usage"] = None
        return chunk

    # -- the page map -------------------------------------------------------------------------

    def _map(self, reads: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """For a whole answer."""
        if self._pages is None:
            return {}
        return {"cairn": {"pages": self._pages.as_dict(), "reads": list(reads)}}

    def _reads(self, piece: Piece) -> list[dict[str, Any]]:
        return [] if piece.reads is None else [_read(self._texts.text(piece.token), piece.reads)]


class CompletionFormat(_Format):
    kind = "text_completion"

    def __init__(self, *given: Any, echo: list[str] | None = None, **options: Any) -> None:
        super().__init__(*given, **options)
        self._echo = echo  # the prompts, if they are to be repeated
        if self.streams:
            for index, choice in enumerate(self.choices):
                choice.echo = self._prompt_of(index)

    def _chunk_head(self) -> dict[str, Any]:
        return {**self._head, "object": self.kind}

    def _text_choice(self, index: int, text: str) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None}

    def _prompt_of(self, index: int) -> str:
        if self._echo is None:
            return ""
        return self._echo[index * self._prompts // len(self.choices)]

    def first(self) -> bytes:
        if self._pages is None:
            return b""
        start = self._text_choice(0, "")
        return _event(self._chunk({**start, "cairn": {"pages": self._pages.as_dict()}}))

    def add(self, index: int, piece: Piece) -> bytes:
        choice = self.choices[index]
        choice.ended = piece.ended
        reads = self._reads(piece)
        if not self.streams:
            choice.text.append(piece.text)
            choice.reads += reads
            if piece.logprob is not None:
                choice.logprobs.append(piece.logprob)
            return b""
        text, choice.echo = choice.echo + piece.text, ""
        if not (text or piece.logprob or reads or piece.ended):
            return b""
        chunk = self._text_choice(index, text)
        if piece.logprob is not None:
            chunk["logprobs"] = self._scores([piece.logprob], choice.offset)
        if piece.ended is not None:
            chunk["finish_reason"] = piece.ended.reason
        choice.offset += len(text)
        if reads:
            chunk["cairn"] = {"reads": reads}
        return _event(self._chunk(chunk))

    def whole(self) -> dict[str, Any]:
        choices = []
        for index, choice in enumerate(self.choices):
            assert choice.ended is not None
            scores: list[TokenLogprob | None] = list(choice.logprobs)
            if self._echo is not None:
                scores = [*(choice.ended.prompt_logprobs or []), *scores]
            choices.append(
                {
                    "index": index,
                    "text": self._prompt_of(index) + "".join(choice.text),
                    "logprobs": self._scores(scores, 0) if scores else None,
                    "finish_reason": choice.ended.reason,
                    **self._map(choice.reads),
                }
            )
        return {**self._head, "object": self.kind, "choices": choices, "usage": self.usage()}

    def _scores(self, scores: Sequence[TokenLogprob | None], offset: int) -> dict[str, Any]:
        tokens, offsets = [], []
        for score in scores:
            text = "" if score is None else self._texts.text(score.token_id)
            tokens.append(text)
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": tokens,
            "token_logprobs": [None if s is None else s.logprob for s in scores],
            "top_logprobs": [
                None if s is None else {self._texts.text(t): p for t, p in s.top} for s in scores
            ],
            "text_offset": offsets,
        }


class ChatFormat(_Format):
    kind = "chat.completion"

    def __init__(self, *given: Any, tools: bool = False, **options: Any) -> None:
        super().__init__(*given, **options)
        self._parsers = [ToolParser() for _ in self.choices] if tools else None

    def _text_choice(self, index: int, text: str) -> dict[str, Any]:
        return _delta(index, {"content": text})

    def first(self) -> bytes:
        events = []
        for index in range(len(self.choices)):
            choice = _delta(index, {"role": "assistant", "content": ""})
            if index == 0 and self._pages is not None:
                choice["cairn"] = {"pages": self._pages.as_dict()}
            events.append(_event(self._chunk(choice)))
        return b"".join(events)

    def add_text(self, index: int, text: str) -> bytes:
        if self._parsers is None:
            return super().add_text(index, text)
        said, calls = self._parsers[index].push(text, final=False)
        return self._say(index, said, calls, None, [])

    def add(self, index: int, piece: Piece) -> bytes:
        choice = self.choices[index]
        choice.ended = piece.ended
        text, calls = piece.text, list[dict[str, Any]]()
        if self._parsers is not None:
            text, calls = self._parsers[index].push(piece.text, final=piece.ended is not None)
        return self._say(index, text, calls, piece.logprob, self._reads(piece))

    def _say(
        self,
        index: int,
        text: str,
        calls: list[dict[str, Any]],
        logprob: TokenLogprob | None,
        reads: list[dict[str, Any]],
    ) -> bytes:
        choice = self.choices[index]
        for call in calls:
            call["index"] = len(choice.calls)
            choice.calls.append(call)
        if not self.streams:
            choice.text.append(text)
            choice.reads += reads
            if logprob is not None:
                choice.logprobs.append(logprob)
            return b""
        if not (text or calls or logprob or reads or choice.ended):
            return b""
        delta: dict[str, Any] = {}
        if text:
            delta["content"] = text
        if calls:
            delta["tool_calls"] = calls
        chunk = _delta(index, delta)
        if logprob is not None:
            chunk["logprobs"] = self._scores([logprob])
        if reads:
            chunk["cairn"] = {"reads": reads}
        if choice.ended is not None:
            chunk["finish_reason"] = self._reason(choice)
        return _event(self._chunk(chunk))

    def _reason(self, choice: Said) -> str:
        assert choice.ended is not None
        return (
            "tool_calls"
            if choice.calls and choice.ended.reason == "stop"
            else (choice.ended.reason)
        )

    def whole(self) -> dict[str, Any]:
        choices = []
        for index, choice in enumerate(self.choices):
            text = "".join(choice.text)
            message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
            if choice.calls:
                message["content"] = text or None
                message["tool_calls"] = [
                    {key: value for key, value in call.items() if key != "index"}
                    for call in choice.calls
                ]
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": self._scores(choice.logprobs) if choice.logprobs else None,
                    "finish_reason": self._reason(choice),
                    **self._map(choice.reads),
                }
            )
        return {**self._head, "object": self.kind, "choices": choices, "usage": self.usage()}

    def _scores(self, scores: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {
            "content": [
                {
                    **self._entry(score.token_id, score.logprob),
                    "top_logprobs": [self._entry(token, value) for token, value in score.top],
                }
                for score in scores
            ],
            "refusal": None,
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._texts.text(token),
            "logprob": logprob,
            "bytes": self._texts.bytes(token),
        }


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + _encode(chunk) + b"\n\n"


def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _read(token: str, reads: TokenReads) -> dict[str, Any]:
    return {
        "token": token,
        "window_page": reads.window_page,
        "layers": reads.layers,
    }
