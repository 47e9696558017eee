"""From the fields of a request's body to SamplingParams."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from cairn.engine.sampling_params import SamplingParams
from cairn.errors import RequestError
from cairn.server.api_error import bad_request, refusal
from cairn.server.schema import ChatRequest, CompletionRequest, Sampling

# Fields that have the same meaning in a body and in SamplingParams.
_COPIED = {field.name for field in fields(SamplingParams)} & set(Sampling.model_fields)
_COMPLETION_TOKENS = 16  # OpenAI's default


def completion_params(
    body: CompletionRequest, room: int, defaults: Mapping[str, Any]
) -> SamplingParams:
    """`room` is the number of tokens that the context has left for the answer to the longest
    prompt. `defaults` are the model's own."""
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise bad_request(
            "best_of",
            f"best_of is {body.best_of} and n is {body.n or 1}; this server does not rank answers, "
            "so that they must be equal: leave best_of out",
        )
    prompt_logprobs = body.logprobs if body.echo else None
    length = body.max_tokens or min(_COMPLETION_TOKENS, room)
    return _make(body, defaults, length, body.logprobs, prompt_logprobs=prompt_logprobs)


def chat_params(body: ChatRequest, room: int, defaults: Mapping[str, Any]) -> SamplingParams:
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise bad_request(
            "max_tokens",
            "max_tokens and max_completion_tokens mean the same; give max_completion_tokens only",
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs", "top_logprobs needs logprobs to be true")
    length = body.max_completion_tokens or body.max_tokens or room
    return _make(body, defaults, length, (body.top_logprobs or 0) if body.logprobs else None)


def _make(
    body: Sampling,
    defaults: Mapping[str, Any],
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options", "stream_options needs stream to be true")
    given = {name: value for name in _COPIED if (value := getattr(body, name)) not in (None, "")}
    if body.logit_bias:
        given["logit_bias"] = {_token(key): value for key, value in body.logit_bias.items()}
    try:
        return SamplingParams(
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            **{"temperature": 1.0, **defaults, **given},
        )
    except RequestError as error:
        raise refusal(str(error)) from error


def _token(key: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", key):
        raise bad_request("logit_bias", f"logit_bias has the key {key[:100]!a}; keys are token ids")
    return int(key)
