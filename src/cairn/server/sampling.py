"""From the fields of a request's body to SamplingParams."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from cairn.engine.sampling_params import MAX_SEED, SamplingParams
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
    length = min(_COMPLETION_TOKENS, room) if body.max_tokens is None else body.max_tokens
    if not length and not body.echo:
        raise bad_request(
            "max_tokens", "max_tokens is 0; it must be at least 1, unless echo is set"
        )
    return _make(body, defaults, max(length, 1), body.logprobs)


def chat_params(body: ChatRequest, room: int, defaults: Mapping[str, Any]) -> SamplingParams:
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise bad_request(
            "max_tokens",
            "max_tokens and max_completion_tokens mean the same; give max_completion_tokens only",
        )
    if body.top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs", "top_logprobs needs logprobs to be true")
    length = body.max_completion_tokens or body.max_tokens or room
    return _make(body, defaults, length, (body.top_logprobs or 0) if body.logprobs else None)


def _make(
    body: Sampling,
    defaults: Mapping[str, Any],
    max_tokens: int,
    logprobs: int | None,
) -> SamplingParams:
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options", "stream_options needs stream to be true")
    if body.prompt_logprobs is not None and body.stream:
        raise bad_request(
            "prompt_logprobs", "prompt_logprobs are not streamed; leave stream out, or use echo"
        )
    given = {name: value for name in _COPIED if (value := getattr(body, name)) not in (None, "")}
    # Other servers' ways to say that nothing is asked for.
    if given.get("top_k") == 0:
        given["top_k"] = -1
    if given.get("seed") == -1:
        del given["seed"]
    if "seed" in given:
        given["seed"] %= MAX_SEED + 1
    if scores_echo(body) and logprobs is not None:
        given["prompt_logprobs"] = max(logprobs, body.prompt_logprobs or 0)
    if body.logit_bias:
        given["logit_bias"] = {_token(key): value for key, value in body.logit_bias.items()}
    try:
        return SamplingParams(
            max_tokens=max_tokens,
            logprobs=logprobs,
            **{"temperature": 1.0, **defaults, **given},
        )
    except RequestError as error:
        raise refusal(str(error)) from error


def scores_echo(body: Sampling) -> bool:
    """Whether the prompt is repeated with its log-probabilities."""
    return isinstance(body, CompletionRequest) and bool(body.echo) and body.logprobs is not None


def _token(key: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", key):
        raise bad_request("logit_bias", f"logit_bias has the key {key[:100]!a}; keys are token ids")
    return int(key)
