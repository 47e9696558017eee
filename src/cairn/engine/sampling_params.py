"""The sampling parameters of a request.

Values are checked when the object is created. The server's messages, the request and the plan all
carry this same object.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

from cairn.errors import RequestError

MAX_SEED = 2**63 - 1
MAX_CHOICES = 128
MAX_LOGPROBS = 20


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    max_tokens: int = _option(128, "Tokens to generate at most.")
    min_tokens: int = _option(0, "Tokens to generate before an end token or a stop token may come.")
    temperature: float = _option(0.0, "0 takes the most likely token; on ties the lowest id.")
    top_k: int = _option(-1, "Keep the k most likely tokens; -1 keeps all.")
    top_p: float = _option(
        1.0, "Keep the smallest set of most likely tokens whose probability reaches top_p."
    )
    min_p: float = _option(
        0.0, "Keep tokens at least min_p times as likely as the most likely one."
    )
    repetition_penalty: float = _option(
        1.0,
        "Divides positive and multiplies negative logits of tokens in the prompt or the output.",
    )
    presence_penalty: float = _option(0.0, "Subtracted from the logits of tokens in the output.")
    frequency_penalty: float = _option(
        0.0,
        "Subtracted from the logits of tokens in the output, once for each time they are there.",
    )
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = _option(
        (), "Added to the logits of single tokens, -100 to 100."
    )
    seed: int | None = _option(
        None, "Same seed, same tokens, whatever else runs in the batch. None draws one."
    )
    n: int = _option(1, "Answers to the same prompt, each with a seed of its own.")
    stop: str | Sequence[str] = _option((), "Strings that end the text; not part of it.")
    stop_token_ids: Sequence[int] = _option(
        (), "Token ids that end the text, besides the model's own end tokens."
    )
    ignore_eos: bool = _option(False, "Go on past the model's end tokens.")
    logprobs: int | None = _option(
        None,
        "Return the log-probability of each generated token and of this many most likely ones.",
    )
    prompt_logprobs: int | None = _option(
        None,
        "The same for the tokens of the prompt, which is then computed without the prefix cache.",
    )

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else _tuple("stop", self.stop)
        stop_ids = _tuple("stop_token_ids", self.stop_token_ids)
        bias = _bias(self.logit_bias)
        for name, value in (("stop", stop), ("stop_token_ids", stop_ids), ("logit_bias", bias)):
            object.__setattr__(self, name, value)
        _check_int("max_tokens", self.max_tokens, 1)
        _check_int("min_tokens", self.min_tokens, 0)
        if self.min_tokens > self.max_tokens:
            _refuse("min_tokens", self.min_tokens, f"at most max_tokens, {self.max_tokens}")
        _check_range("temperature", self.temperature, 0, math.inf)
        if self.top_p == 0:
            _refuse(
                "top_p",
                self.top_p,
                "above 0 and at most 1; temperature 0 takes the most likely token",
            )
        _check_range("top_p", self.top_p, 0, 1)
        _check_range("min_p", self.min_p, 0, 1)
        _check_range("repetition_penalty", self.repetition_penalty, 0, math.inf, above=True)
        _check_range("presence_penalty", self.presence_penalty, -2, 2)
        _check_range("frequency_penalty", self.frequency_penalty, -2, 2)
        _check_int("top_k", self.top_k, -1)
        if self.top_k == 0:
            _refuse("top_k", 0, "at least 1, or -1 to keep all tokens")
        if self.seed is not None:
            _check_int("seed", self.seed, 0, MAX_SEED)
        _check_int("n", self.n, 1, MAX_CHOICES)
        for text in stop:
            if not isinstance(text, str) or not text:
                _refuse("stop", text, "a non-empty string or a list of them")
        for token in stop_ids:
            _check_int("stop_token_ids", token, 0)
        if not isinstance(self.ignore_eos, bool):
            _refuse("ignore_eos", self.ignore_eos, "true or false")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 0, MAX_LOGPROBS)

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
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise RequestError(
                f"unknown sampling field {', '.join(unknown)}; known: {', '.join(sorted(known))}"
            )
        return cls(**values)


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
        _check_int("logit_bias", pair[0], 0)
        _check_range("logit_bias", pair[1], -100, 100)
        result.append((pair[0], float(pair[1])))
    return tuple(result)


def _check_range(name: str, value: object, low: float, high: float, *, above: bool = False) -> None:
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not abs(value) <= sys.float_info.max
    ):
        _refuse(name, value, "a finite number")
    if not low <= value <= high or (above and value == low):
        least = f"above {low}" if above else f"at least {low}"
        _refuse(name, value, least if high == math.inf else f"{least} and at most {high}")


def _check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    ok = isinstance(value, int) and not isinstance(value, bool)
    if not ok or value < low or (high is not None and value > high):  # type: ignore[operator]
        limit = f"of at least {low}" if high is None else f"from {low} to {high}"
        _refuse(name, value, f"a whole number {limit}")
