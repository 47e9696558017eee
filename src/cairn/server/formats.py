"""Answers in OpenAI's format: chunks of a stream, or the whole answer.

An event that is only text, which most are, is two constants of its choice around the text. Others
are dicts that msgspec encodes. Traces are in a field `cairn` of each choice.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import msgspec

from cairn.engine.logprobs import TokenLogprob
from cairn.server.answer import Choice
from cairn.server.api_error import ApiError
from cairn.server.output import OutputParser, Parsed
from cairn.server.token_texts import TokenTexts
from cairn.server.tools.form import Call
from cairn.server.wire import Detail

_encode = msgspec.json.Encoder().encode
_TEXT = "\0"  # stands for the text in an event that is encoded in advance
_UNKNOWN = -math.inf  # log-probability of a prompt's first token

Scores = list[TokenLogprob]
Reads = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class FormOptions:
    """What a request asks of the form of its answer."""

    streams: bool = False
    with_usage: bool = False
    continuous_usage: bool = False
    token_ids: bool = False
    """Add the ids of the prompt's and the answer's tokens."""
    every_token: bool = False
    """An event of a stream for each token, with its id: without a tokenizer there is no text."""
    prompt_logprobs: bool = False
    echo: Sequence[str] | None = None
    """What answers begin with, one text for each prompt."""
    scores_echo: bool = False
    trace: dict[str, Any] | None = None
    """The prompt's pages, if the request is traced."""
    parsers: Sequence[OutputParser] | None = None
    """One for each choice; None if everything is content."""


class Format:
    """An answer in some API's format. Subclasses are OpenAI's completions and other APIs."""

    kind = ""
    chunk_kind = ""

    def __init__(
        self,
        answer_id: str,
        model: str,
        prompts: Sequence[Sequence[int]],
        choices: Sequence[Choice],
        token_texts: TokenTexts,
        options: FormOptions,
    ) -> None:
        self.streams = options.streams
        self.choices = choices
        self.prompts = prompts
        self.options = options
        self.token_texts = token_texts
        self.head = {"id": answer_id, "created": int(time.time()), "model": model}
        self._with_ids = options.token_ids or (options.streams and options.every_token)
        self.plain = not (options.parsers or self._with_ids or options.continuous_usage)
        """A token that brings only text has only text to say: `add_text` may be used."""
        if options.echo is not None:
            for choice in choices:
                choice.echo = options.echo[self.prompt_of(choice)]

    def prompt_of(self, choice: Choice) -> int:
        """Index of the prompt that a choice answers."""
        return choice.index * len(self.prompts) // len(self.choices)

    # -- what each API defines ----------------------------------------------------------------

    def first(self) -> bytes:
        """Events before any token."""
        return b""

    def emit(
        self, choice: Choice, new: Parsed, scores: Scores, reads: Reads, ids: list[int]
    ) -> bytes:
        """The events for what new tokens brought."""
        raise NotImplementedError

    def last(self) -> bytes:
        """Events after all choices have ended."""
        return b""

    def whole(self) -> dict[str, Any]:
        """The answer in one piece, after all choices have ended."""
        raise NotImplementedError

    def failure(self, error: ApiError) -> bytes:
        """The last event of a stream that fails."""
        return b"data: " + error.encoded() + b"\n\n"

    # -- tokens -------------------------------------------------------------------------------

    def add_text(self, choice: Choice, text: str) -> bytes:
        """The event of a token that brought only text; b"" for none."""
        if not self.streams:
            choice.texts.append(text)
            return b""
        text, choice.echo = choice.echo + text, ""
        return self.emit(choice, Parsed(text), [], [], []) if text else b""

    def add(self, choice: Choice, token: int, text: str, detail: Detail | None) -> bytes:
        """Likewise of any token."""
        new = Parsed(text)
        if self.options.parsers is not None:
            parser = self.options.parsers[choice.index]
            new = parser.push(text, choice.reason)
            choice.thought_tokens += parser.thinking
        choice.calls += new.calls
        scores: Scores = []
        reads: Reads = []
        ids = [token] if self._with_ids and choice.tokens else []
        if detail is not None and detail.start is not None and self.options.scores_echo:
            scores += self._prompt_scores(choice)
        if detail is not None and detail.logprob is not None and choice.tokens:
            scores.append(detail.logprob)
        if detail is not None and detail.reads is not None:
            token_text, read = self.token_texts.text(token), detail.reads
            layers = {"window_page": read.window_page, "layers": read.layers}
            reads.append({"token": token_text, **layers})
        if not self.streams:
            choice.texts.append(new.text)
            choice.thoughts.append(new.reasoning)
            choice.logprobs += scores
            choice.reads += reads
            choice.ids += ids
            return b""
        if choice.echo:
            new, choice.echo = new._replace(text=choice.echo + new.text), ""
        if not (any(new) or scores or reads or ids or choice.reason):
            return b""
        return self.emit(choice, new, scores, reads, ids)

    def _prompt_scores(self, choice: Choice) -> Scores:
        """Scores of the prompt's tokens; the first one has only its id."""
        found = None if choice.start is None else choice.start.prompt_logprobs
        if not found:
            return []
        first = self.prompts[self.prompt_of(choice)][0]
        return [TokenLogprob(first, _UNKNOWN), *(score for score in found if score is not None)]

    # -- parts of answers ---------------------------------------------------------------------

    def text_of(self, choice: Choice) -> str:
        return choice.echo + "".join(choice.texts)

    def reason_of(self, choice: Choice) -> str | None:
        return "tool_calls" if choice.calls and choice.reason == "stop" else choice.reason

    def usage(self) -> dict[str, Any]:
        """Choices of one prompt share its tokens."""
        each = len(self.choices) // len(self.prompts)
        firsts = [choice for choice in self.choices[::each] if choice.reason is not None]
        prompt = sum(choice.prompt_tokens for choice in firsts)
        completion = sum(choice.tokens for choice in self.choices if choice.reason is not None)
        cached = sum(choice.start.cached_tokens for choice in firsts if choice.start is not None)
        usage = _usage(prompt, completion, cached)
        details = {}
        if self.options.parsers is not None:
            details["reasoning_tokens"] = sum(choice.thought_tokens for choice in self.choices)
        if drafted := sum(choice.drafted for choice in self.choices):
            accepted = sum(choice.accepted for choice in self.choices)
            details["accepted_prediction_tokens"] = accepted
            details["rejected_prediction_tokens"] = drafted - accepted
        if details:
            usage["completion_tokens_details"] = details
        return usage


class OpenAIFormat(Format):
    """What chat and text completions share."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        for choice in self.choices if self.streams else ():
            event = self._event(self._chunk_choice(choice.index, Parsed(_TEXT)))
            # What follows the text is not the client's, so it cannot contain the placeholder.
            before, _, after = event.rpartition(_encode(_TEXT))
            choice.around = before, after

    def _chunk_choice(self, index: int, new: Parsed) -> dict[str, Any]:
        """A choice of a chunk."""
        raise NotImplementedError

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def _scores(self, scores: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
        raise NotImplementedError

    def add_text(self, choice: Choice, text: str) -> bytes:
        if choice.echo or not (self.streams and text):
            return super().add_text(choice, text)
        before, after = choice.around
        return before + _encode(text) + after

    def emit(
        self, choice: Choice, new: Parsed, scores: Scores, reads: Reads, ids: list[int]
    ) -> bytes:
        chunk = self._chunk_choice(choice.index, new)
        if scores:
            chunk["logprobs"] = self._scores(scores, choice.offset)
            choice.offset += sum(len(self.token_texts.text(s.token_id)) for s in scores)
        if reads:
            chunk["cairn"] = {"reads": reads}
        if self._with_ids:
            chunk["token_ids"] = ids
        if choice.reason is not None:
            chunk.update(self._end(choice))
        return self._event(chunk, self._usage_so_far(choice))

    def _end(self, choice: Choice) -> dict[str, Any]:
        """Why a choice ended: OpenAI's, vLLM's and SGLang's fields."""
        own = choice.stop_text is None and choice.stop_token in self.token_texts.ends
        reason = choice.stop_text if choice.stop_text is not None else choice.stop_token
        return {
            "finish_reason": self.reason_of(choice),
            "stop_reason": None if own else reason,
            "matched_stop": reason,
        }

    def _usage_so_far(self, choice: Choice) -> dict[str, Any] | None:
        if not self.options.continuous_usage:
            return None
        cached = 0 if choice.start is None else choice.start.cached_tokens
        return _usage(choice.prompt_tokens, choice.tokens, cached)

    def _usage_before(self, choice: Choice) -> dict[str, Any] | None:
        """Before any token is told, even if one has come."""
        return _usage(choice.prompt_tokens, 0, 0) if self.options.continuous_usage else None

    def last(self) -> bytes:
        done = b"data: [DONE]\n\n"
        return self._event(None, self.usage()) + done if self.options.with_usage else done

    def whole(self) -> dict[str, Any]:
        choices = []
        for choice in self.choices:
            body = {
                "index": choice.index,
                **self._whole_choice(choice),
                "logprobs": self._scores(choice.logprobs, 0) if choice.logprobs else None,
                **self._end(choice),
                "token_ids": choice.ids if self.options.token_ids else None,
            }
            if self.options.trace is not None:
                body["cairn"] = {"pages": self.options.trace, "reads": choice.reads}
            choices.append(body)
        return {**self.head, "object": self.kind, "choices": choices, "usage": self.usage()}

    def _of_prompt(self, choice: Choice) -> dict[str, Any]:
        """vLLM's fields about a choice's prompt."""
        ids = list(self.prompts[self.prompt_of(choice)]) if self.options.token_ids else None
        scores = None
        if self.options.prompt_logprobs and choice.start is not None:
            scores = [
                None if score is None else self._ranked(score)
                for score in choice.start.prompt_logprobs or ()
            ]
        return {"prompt_token_ids": ids, "prompt_logprobs": scores}

    def _ranked(self, score: TokenLogprob) -> dict[str, Any]:
        """Log-probabilities by token id. The rank of a token that is not among the top ones is not
        known."""
        ranks = {token: place for place, (token, _) in enumerate(score.top, 1)}
        found = dict(score.top) | {score.token_id: score.logprob}
        return {
            str(token): {
                "logprob": value,
                "rank": ranks.get(token),
                "decoded_token": self.token_texts.text(token),
            }
            for token, value in found.items()
        }

    def _event(
        self,
        choice: dict[str, Any] | None,
        usage: dict[str, Any] | None = None,
        **extra: Any,
    ) -> bytes:
        choices = [] if choice is None else [choice]
        chunk = {**self.head, "object": self.chunk_kind, "choices": choices, **extra}
        if self.options.with_usage:
            chunk["usage"] = usage
        return b"data: " + _encode(chunk) + b"\n\n"


class CompletionFormat(OpenAIFormat):
    kind = chunk_kind = "text_completion"

    def first(self) -> bytes:
        events = []
        if self.options.trace is not None:
            pages = {"pages": self.options.trace}
            events.append(self._event({**self._chunk_choice(0, Parsed()), "cairn": pages}))
        if self.options.token_ids:
            for choice in self.choices:
                ids = {"prompt_token_ids": self._of_prompt(choice)["prompt_token_ids"]}
                chunk = {**self._chunk_choice(choice.index, Parsed()), **ids}
                events.append(self._event(chunk, self._usage_before(choice)))
        return b"".join(events)

    def _chunk_choice(self, index: int, new: Parsed) -> dict[str, Any]:
        return {"index": index, "text": new.text, "logprobs": None, "finish_reason": None}

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        return {"text": self.text_of(choice), **self._of_prompt(choice)}

    def _scores(self, scores: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
        find = self.token_texts.text
        tokens = [find(score.token_id) for score in scores]
        offsets = list(accumulate(map(len, tokens), initial=offset))[:-1]
        known = [None if score.logprob == _UNKNOWN else score for score in scores]
        return {
            "tokens": tokens,
            "token_logprobs": [None if s is None else s.logprob for s in known],
            "top_logprobs": [
                None
                if s is None
                else {**{find(t): p for t, p in reversed(s.top)}, find(s.token_id): s.logprob}
                for s in known
            ],
            "text_offset": offsets,
        }


class ChatFormat(OpenAIFormat):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def first(self) -> bytes:
        events = []
        for choice in self.choices:
            body = self._chunk_choice(choice.index, Parsed())
            body["delta"] = {"role": "assistant", "content": ""}
            if choice.index == 0 and self.options.trace is not None:
                body["cairn"] = {"pages": self.options.trace}
            extra = {}
            if choice.index == 0 and self.options.token_ids:
                extra["prompt_token_ids"] = list(self.prompts[0])
            events.append(self._event(body, self._usage_before(choice), **extra))
        return b"".join(events)

    def _chunk_choice(self, index: int, new: Parsed) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": new.text} if new.text else {}
        if new.reasoning:
            delta["reasoning_content"] = new.reasoning
        if new.calls:
            begin = len(self.choices[index].calls) - len(new.calls)
            delta["tool_calls"] = [
                {"index": begin + i, **_call(call)} for i, call in enumerate(new.calls)
            ]
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        text = self.text_of(choice)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self.options.parsers is not None:
            message["reasoning_content"] = "".join(choice.thoughts) or None
        if choice.calls:
            message["content"] = text or None
            message["tool_calls"] = [_call(call) for call in choice.calls]
        return {"message": message}

    def whole(self) -> dict[str, Any]:
        return {**super().whole(), **self._of_prompt(self.choices[0])}

    def _scores(self, scores: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
        return {"content": self.token_texts.scored(scores), "refusal": None}


def _usage(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _call(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}
