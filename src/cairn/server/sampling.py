"""From a request's fields to SamplingParams."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from cairn.engine.sampling_params import SamplingParams
from cairn.errors import RequestError
from cairn.server.api_error import ApiError, refusal
from cairn.server.schema import ChatRequest, CompletionRequest, Sampling

_COPIED = (
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "n",
    "seed",
    "stop_token_ids",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "min_tokens",
    "ignore_eos",
)
_COMPLETION_TOKENS = 16  # OpenAI's default


def completion_params(
    body: CompletionRequest, room: int, defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """`room` is what the context has left for the answer to the longest prompt; `defaults` are
    the model's own."""
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ApiError(
            400,
            f"best_of is {body.best_of} and n is {body.n or 1}; this server does not rank answers, "
            "so that they must be equal: leave best_of out",
            param="best_of",
        )
    fields = _common(body, defaults)
    fields["max_tokens"] = body.max_tokens or min(_COMPLETION_TOKENS, room)
    if body.logprobs is not None:
        fields["logprobs"] = body.logprobs
        if body.echo:
            fields["prompt_logprobs"] = body.logprobs
    return _checked(fields)


def chat_params(body: ChatRequest, room: int, defaults: Mapping[str, Any]) -> dict[str, Any]:
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise ApiError(
            400,
            "max_tokens and max_completion_tokens mean the same; give max_completion_tokens only",
            param="max_tokens",
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    fields = _common(body, defaults)
    fields["max_tokens"] = body.max_completion_tokens or body.max_tokens or room
    if body.logprobs:
        fields["logprobs"] = body.top_logprobs or 0
    return _checked(fields)


def _common(body: Sampling, defaults: Mapping[str, Any]) -> dict[str, Any]:
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream to be true", param="stream_options")
    given = {name: value for name in _COPIED if (value := getattr(body, name)) is not None}
    fields: dict[str, Any] = {"temperature": 1.0, **defaults, **given}
    if body.stop:
        fields["stop"] = [body.stop] if isinstance(body.stop, str) else list(body.stop)
    if body.logit_bias:
        fields["logit_bias"] = {_token(key): value for key, value in body.logit_bias.items()}
    return fields


def _token(key: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", key):
        raise ApiError(
            400, f"logit_bias has the key {key!a}; keys are token ids", param="logit_bias"
        )
    return int(key)


def _checked(fields: dict[str, Any]) -> dict[str, Any]:
    """Refused here rather than by the engine, which has other things to do."""
    try:
        SamplingParams.from_kwargs(fields)
    except RequestError as error:
        raise refusal(str(error)) from error
    return fields
