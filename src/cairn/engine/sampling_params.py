"""The sampling parameters of a request.

Values are checked when the object is created. The server's messages, the request and the plan all
carry this same object.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from cairn.config import check_options, from_names, option
from cairn.errors import RequestError

MAX_SEED = 2**63 - 1
MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOP_LENGTH = 1024  # characters


@dataclass(frozen=True, slots=True)
class SamplingParams:
    max_tokens: int = option(128, "Tokens to generate at most.", low=1, high=math.inf)
    min_tokens: int = option(
        0, "Tokens to generate before an end token or a stop token may come.", low=0
    )
    temperature: float = option(0.0, "0 takes the most likely token; on ties the lowest id.", low=0)
    top_k: int = option(-1, "Keep the k most likely tokens; -1 keeps all.", low=-1, high=math.inf)
    top_p: float = option(
        1.0,
        "Keep the smallest set of most likely tokens whose probability reaches top_p.",
        low=0,
        high=1,
    )
    min_p: float = option(
        0.0, "Keep tokens at least min_p times as likely as the most likely one.", low=0, high=1
    )
    repetition_penalty: float = option(
        1.0,
        "Divides positive and multiplies negative logits of tokens in the prompt or the output.",
        above=0,
    )
    presence_penalty: float = option(
        0.0, "Subtracted from the logits of tokens in the output.", low=-2, high=2
    )
    frequency_penalty: float = option(
        0.0,
        "Subtracted from the logits of tokens in the output, once for each time they are there.",
        low=-2,
        high=2,
    )
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = option(
        (), "Added to the logits of single tokens, -100 to 100."
    )
    seed: int | None = option(
        None,
        "Same seed, same tokens, whatever else runs in the batch. None draws one.",
        low=0,
        high=MAX_SEED,
    )
    n: int = option(
        1, "Answers to the same prompt, each with a seed of its own.", low=1, high=MAX_CHOICES
    )
    stop: str | Sequence[str] = option((), "Strings that end the text; not part of it.")
    stop_token_ids: Sequence[int] = option(
        (), "Token ids that end the text, besides the model's own end tokens."
    )
    ignore_eos: bool = option(False, "Go on past the model's end tokens.")
    logprobs: int | None = option(
        None,
        "Return the log-probability of each generated token and of this many most likely ones.",
        low=0,
        high=MAX_LOGPROBS,
    )
    speculation: bool = option(
        True, "Draft tokens and check them, if the engine does so. The text is the same either way."
    )
    prompt_logprobs: int | None = option(
        None,
        "The same for the tokens of the prompt, which is then computed without the prefix cache.",
        low=0,
        high=MAX_LOGPROBS,
    )

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else _tuple("stop", self.stop)
        stop_ids = _tuple("stop_token_ids", self.stop_token_ids)
        bias = _bias(self.logit_bias)
        for name, value in (("stop", stop), ("stop_token_ids", stop_ids), ("logit_bias", bias)):
            object.__setattr__(self, name, value)
        check_options(self, RequestError)
        if self.min_tokens > self.max_tokens:
            _refuse("min_tokens", self.min_tokens, f"at most max_tokens, {self.max_tokens}")
        if self.top_p == 0:
            hint = "temperature 0 takes the most likely token"
            _refuse("top_p", self.top_p, f"above 0 and at most 1; {hint}")
        if self.top_k == 0:
            _refuse("top_k", 0, "at least 1, or -1 to keep all tokens")
        for text in stop:
            if not isinstance(text, str) or not text:
                _refuse("stop", text, "a non-empty string or a list of them")
            if len(text) > MAX_STOP_LENGTH:
                raise RequestError(
                    f"stop has a string of {len(text)} characters; at most {MAX_STOP_LENGTH}"
                )
        for token in stop_ids:
            _check_token("stop_token_ids", token)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return tuple(self.stop)

    @property
    def bias(self) -> tuple[tuple[int, float], ...]:
        return self.logit_bias  # type: ignore[return-value]

    @property
    def has_penalties(self) -> bool:
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    @classmethod
    def from_kwargs(cls, values: dict[str, Any]) -> SamplingParams:
        return from_names(cls, values, RequestError, "unknown sampling field")


def _refuse(name: str, value: object, allowed: str) -> NoReturn:
    raise RequestError(f"{name} is {value!r}; it must be {allowed}")


def _tuple(name: str, value: object) -> tuple[object, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        _refuse(name, value, "a list")
    return tuple(value)


def _bias(value: object) -> tuple[tuple[int, float], ...]:
    pairs = value.items() if isinstance(value, Mapping) else _tuple("logit_bias", value)
    result = []
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            _refuse("logit_bias", value, "a map from token ids to numbers")
        token, bias = pair
        _check_token("logit_bias", token)
        if not isinstance(bias, int | float) or isinstance(bias, bool) or not -100 <= bias <= 100:
            _refuse("logit_bias", bias, "a number from -100 to 100")
        result.append((token, float(bias)))
    if len(dict(result)) < len(result):
        _refuse("logit_bias", value, "a map from token ids to numbers, with each id once")
    return tuple(result)


def _check_token(name: str, token: object) -> None:
    if not isinstance(token, int) or isinstance(token, bool) or token < 0:
        _refuse(name, token, "a whole number from 0")
