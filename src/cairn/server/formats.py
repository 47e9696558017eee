"""Answers in OpenAI's words: chunks of a stream, or the whole.

Chunks are plain dicts, which msgspec writes; the page map's data travel in a field `cairn` of each
choice.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cairn.engine.logprobs import TokenLogprob
from cairn.server.token_text import TokenTexts
from cairn.server.tools import ToolParser
from cairn.server.wire import Ended, Piece, Ready, TokenReads


@dataclass(slots=True)
class Choice:
    """What one choice has said so far."""

    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reads: list[dict[str, Any]] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    ended: Ended | None = None
    offset: int = 0  # characters, for completions' text_offset


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
        self.choices = [Choice() for _ in range(choices)]
        self._texts = texts
        self._prompts = prompts
        self._with_usage = with_usage
        self._pages = pages
        self._head = {"id": answer_id, "created": int(time.time()), "model": model}

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

    def last(self) -> list[object]:
        if not self._with_usage:
            return []
        return [{**self._chunk_head(), "choices": [], "usage": self.usage()}]

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
        return (
            [
                _read(self._texts.text(token), read)
                for token, read in zip(piece.token_ids, piece.reads, strict=True)
            ]
            if piece.reads
            else []
        )


class CompletionFormat(_Format):
    kind = "text_completion"

    def __init__(self, *given: Any, echo: list[str] | None = None, **options: Any) -> None:
        super().__init__(*given, **options)
        self._echo = echo  # the prompts, if they are to be repeated

    def _chunk_head(self) -> dict[str, Any]:
        return {**self._head, "object": self.kind}

    def _prompt_of(self, index: int) -> str:
        if self._echo is None:
            return ""
        return self._echo[index * self._prompts // len(self.choices)]

    def first(self) -> list[object]:
        if self._pages is None:
            return []
        start = {"index": 0, "text": "", "logprobs": None, "finish_reason": None}
        return [self._chunk({**start, "cairn": {"pages": self._pages.as_dict()}})]

    def chunks(self, index: int, piece: Piece) -> list[object]:
        choice = self.choices[index]
        text = piece.text
        scores: list[TokenLogprob | None] = list(piece.logprobs)
        if self.streams and not choice.text:
            text = self._prompt_of(index) + text
        choice.text.append(text)
        choice.logprobs += piece.logprobs
        choice.ended = piece.ended
        reads = self._reads(piece)
        if not self.streams:
            choice.reads += reads
            return []
        if not (text or scores or reads or piece.ended):
            return []
        chunk: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": self._scores(scores, choice.offset) if scores else None,
            "finish_reason": piece.ended.reason if piece.ended else None,
        }
        choice.offset += len(text)
        if reads:
            chunk["cairn"] = {"reads": reads}
        return [self._chunk(chunk)]

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

    def first(self) -> list[object]:
        chunks: list[object] = []
        for index in range(len(self.choices)):
            choice = _delta(index, {"role": "assistant", "content": ""})
            if index == 0 and self._pages is not None:
                choice["cairn"] = {"pages": self._pages.as_dict()}
            chunks.append(self._chunk(choice))
        return chunks

    def chunks(self, index: int, piece: Piece) -> list[object]:
        choice = self.choices[index]
        text = piece.text
        calls: list[dict[str, Any]] = []
        if self._parsers is not None:
            text, calls = self._parsers[index].push(piece.text, final=piece.ended is not None)
        choice.ended = piece.ended
        reads = self._reads(piece)
        for call in calls:
            call["index"] = len(choice.calls)
            choice.calls.append(call)
        if not self.streams:
            choice.text.append(text)
            choice.logprobs += piece.logprobs
            choice.reads += reads
            return []
        if not (text or calls or piece.logprobs or reads or piece.ended):
            return []
        delta: dict[str, Any] = {}
        if text:
            delta["content"] = text
        if calls:
            delta["tool_calls"] = calls
        chunk = _delta(index, delta)
        if piece.logprobs:
            chunk["logprobs"] = self._scores(piece.logprobs)
        if reads:
            chunk["cairn"] = {"reads": reads}
        if piece.ended is not None:
            chunk["finish_reason"] = self._reason(choice)
        return [self._chunk(chunk)]

    def _reason(self, choice: Choice) -> str:
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


def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _read(token: str, reads: TokenReads) -> dict[str, Any]:
    return {
        "token": token,
        "window_page": reads.window_page,
        "layers": [
            {
                "layer": layer.layer,
                "pages": layer.pages,
                "weights": layer.weights,
                "window": layer.window,
            }
            for layer in reads.layers
        ],
    }
