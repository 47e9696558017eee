"""Answers in OpenAI's format: chunks of a stream, or the whole answer.

An event that is only text, which most are, is two constants of its choice around the text. Others
are dicts that msgspec encodes. Traces are in a field `cairn` of each choice.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec
from tokenizers import pre_tokenizers

from cairn.engine.logprobs import TokenLogprob
from cairn.server.answer import Choice
from cairn.server.tools import ToolParser
from cairn.server.wire import Detail
from cairn.text.tokenizer import Tokenizer

_encode = msgspec.json.Encoder().encode
_TEXT = "\0"  # stands for the text in an event that is encoded in advance
_CACHED_TOKENS = 1 << 17


class Format:
    kind = ""
    chunk_kind = ""

    def __init__(
        self,
        answer_id: str,
        model: str,
        choices: Sequence[Choice],
        token_texts: TokenTexts,
        *,
        prompts: int = 1,
        streams: bool = False,
        with_usage: bool = False,
        trace: dict[str, Any] | None = None,
        tools: bool = False,
    ) -> None:
        """`trace` describes the prompt's pages, if the request is traced."""
        self.streams = streams
        self.choices = choices
        self._token_texts = token_texts
        self._prompts = prompts
        self._with_usage = with_usage
        self._trace = trace
        self._parsers = [ToolParser() for _ in choices] if tools else None
        self._head = {"id": answer_id, "created": int(time.time()), "model": model}
        for choice in choices if streams else ():
            event = self._event(self._chunk_choice(choice.index, _TEXT, []))
            # What follows the text is not the client's, so it cannot contain the placeholder.
            before, _, after = event.rpartition(_encode(_TEXT))
            choice.around = before, after

    # -- what the two kinds of completion define ----------------------------------------------

    def first(self) -> bytes:
        """Events before any token."""
        raise NotImplementedError

    def _chunk_choice(self, index: int, text: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        """A choice of a chunk that has this text and these tool calls."""
        raise NotImplementedError

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def _scores(self, scores: Sequence[TokenLogprob | None], offset: int) -> dict[str, Any]:
        raise NotImplementedError

    # -- tokens -------------------------------------------------------------------------------

    def add_text(self, choice: Choice, text: str) -> bytes:
        """The event of a token that brought only text; b"" for none."""
        if self._parsers is not None:
            return self.add(choice, 0, text, None)
        if not self.streams:
            choice.texts.append(text)
            return b""
        if choice.echo:
            text, choice.echo = choice.echo + text, ""
        if not text:
            return b""
        before, after = choice.around
        return before + _encode(text) + after

    def add(self, choice: Choice, token: int, text: str, detail: Detail | None) -> bytes:
        """Likewise of any token."""
        calls: list[dict[str, Any]] = []
        if self._parsers is not None:
            parser = self._parsers[choice.index]
            text, calls = parser.push(text, final=choice.reason is not None)
            for call in calls:
                call["index"] = len(choice.calls)
                choice.calls.append(call)
        scores: list[TokenLogprob | None] = []
        reads: list[dict[str, Any]] = []
        if detail is not None and detail.logprob is not None:
            scores.append(detail.logprob)
        if detail is not None and detail.reads is not None:
            token_text, read = self._token_texts.text(token), detail.reads
            layers = {"window_page": read.window_page, "layers": read.layers}
            reads.append({"token": token_text, **layers})
        if not self.streams:
            choice.texts.append(text)
            choice.logprobs += scores
            choice.reads += reads
            return b""
        text, choice.echo = choice.echo + text, ""
        if not (text or calls or scores or reads or choice.reason):
            return b""
        chunk = self._chunk_choice(choice.index, text, calls)
        if scores:
            chunk["logprobs"] = self._scores(scores, choice.offset)
        if reads:
            chunk["cairn"] = {"reads": reads}
        chunk["finish_reason"] = self._reason(choice)
        choice.offset += len(text)
        return self._event(chunk)

    def _reason(self, choice: Choice) -> str | None:
        return "tool_calls" if choice.calls and choice.reason == "stop" else choice.reason

    # -- the end ------------------------------------------------------------------------------

    def last(self) -> bytes:
        """Events after all choices have ended."""
        return self._event(None, self.usage()) if self._with_usage else b""

    def whole(self) -> dict[str, Any]:
        """The answer in one piece, after all choices have ended."""
        choices = []
        for choice in self.choices:
            body = {
                "index": choice.index,
                **self._whole_choice(choice),
                "logprobs": self._scores(choice.logprobs, 0) if choice.logprobs else None,
                "finish_reason": self._reason(choice),
            }
            if self._trace is not None:
                body["cairn"] = {"pages": self._trace, "reads": choice.reads}
            choices.append(body)
        return {**self._head, "object": self.kind, "choices": choices, "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Choices of one prompt share its tokens."""
        each = len(self.choices) // self._prompts
        firsts = [choice for choice in self.choices[::each] if choice.reason is not None]
        prompt = sum(choice.prompt_tokens for choice in firsts)
        completion = sum(choice.tokens for choice in self.choices if choice.reason is not None)
        cached = sum(choice.start.cached_tokens for choice in firsts if choice.start is not None)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _event(self, choice: dict[str, Any] | None, usage: dict[str, Any] | None = None) -> bytes:
        choices = [] if choice is None else [choice]
        chunk = {**self._head, "object": self.chunk_kind, "choices": choices}
        if self._with_usage:
            chunk["usage"] = usage
        return b"data: " + _encode(chunk) + b"\n\n"


class CompletionFormat(Format):
    kind = chunk_kind = "text_completion"

    def __init__(self, *given: Any, echo: Sequence[str] | None = None, **options: Any) -> None:
        """`echo` are the prompts, if they are to be repeated."""
        super().__init__(*given, **options)
        self._echo = echo
        if echo is not None:
            for choice in self.choices:
                choice.echo = echo[choice.index * len(echo) // len(self.choices)]

    def first(self) -> bytes:
        if self._trace is None:
            return b""
        return self._event({**self._chunk_choice(0, "", []), "cairn": {"pages": self._trace}})

    def _chunk_choice(self, index: int, text: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None}

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        if self._echo is not None and choice.start is not None and choice.start.prompt_logprobs:
            choice.logprobs[:0] = choice.start.prompt_logprobs
        return {"text": choice.echo + "".join(choice.texts)}

    def _scores(self, scores: Sequence[TokenLogprob | None], offset: int) -> dict[str, Any]:
        find = self._token_texts.text
        tokens, offsets = [], []
        for score in scores:
            tokens.append("" if score is None else find(score.token_id))
            offsets.append(offset)
            offset += len(tokens[-1])
        return {
            "tokens": tokens,
            "token_logprobs": [None if s is None else s.logprob for s in scores],
            "top_logprobs": [None if s is None else {find(t): p for t, p in s.top} for s in scores],
            "text_offset": offsets,
        }


class ChatFormat(Format):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def first(self) -> bytes:
        events = []
        for choice in self.choices:
            body = self._chunk_choice(choice.index, "", [])
            body["delta"] = {"role": "assistant", "content": ""}
            if choice.index == 0 and self._trace is not None:
                body["cairn"] = {"pages": self._trace}
            events.append(self._event(body))
        return b"".join(events)

    def _chunk_choice(self, index: int, text: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": text} if text else {}
        if calls:
            delta["tool_calls"] = calls
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        text = "".join(choice.texts)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if choice.calls:
            message["content"] = text or None
            message["tool_calls"] = [
                {key: value for key, value in call.items() if key != "index"}
                for call in choice.calls
            ]
        return {"message": message}

    def _scores(self, scores: Sequence[TokenLogprob | None], offset: int) -> dict[str, Any]:
        content = [
            {
                **self._entry(score.token_id, score.logprob),
                "top_logprobs": [self._entry(token, value) for token, value in score.top],
            }
            for score in scores
            if score is not None
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        texts = self._token_texts
        return {"token": texts.text(token), "logprob": logprob, "bytes": texts.bytes(token)}


class TokenTexts:
    """Text and bytes of single tokens. The text of a partial character is a replacement."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._alphabet = byte_alphabet(tokenizer)
        self.text = lru_cache(_CACHED_TOKENS)(self._text)
        self.bytes = lru_cache(_CACHED_TOKENS)(self._find_bytes)

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
