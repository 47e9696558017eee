"""What a request may ask of the sampler. Checked on construction: a bad value never queues."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NoReturn

from cairn.errors import RequestError

MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    max_tokens: int = 128
    """Tokens to generate at most."""
    temperature: float = 0.0
    """0 takes the most likely token; on ties the lowest id."""
    top_k: int = -1
    """Keep the k most likely tokens; -1 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches top_p."""
    seed: int | None = None
    """Same seed, same tokens, whatever else runs in the batch. None draws one."""
    stop: str | Sequence[str] = ()
    """Strings that end the text; not part of it."""
    stop_token_ids: Sequence[int] = ()
    """Token ids that end the text, besides the model's own end tokens."""
    ignore_eos: bool = False
    """Go on past the model's end tokens."""

    def __post_init__(self) -> None:
        stop: tuple[object, ...] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        _check_int("max_tokens", self.max_tokens, 1)
        _check_number("temperature", self.temperature)
        if self.temperature < 0:
            _refuse("temperature", self.temperature, "at least 0")
        _check_number("top_p", self.top_p)
        if not 0 < self.top_p <= 1:
            _refuse("top_p", self.top_p, "above 0 and at most 1")
        _check_int("top_k", self.top_k, -1)
        if self.top_k == 0:
            _refuse("top_k", 0, "at least 1, or -1 to keep all tokens")
        if self.seed is not None:
            _check_int("seed", self.seed, 0, MAX_SEED)
        for text in stop:
            if not isinstance(text, str) or not text:
                _refuse("stop", text, "a non-empty string or a list of them")
        for token in self.stop_token_ids:
            _check_int("stop_token_ids", token, 0)
        _check_bool("ignore_eos", self.ignore_eos)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return tuple(self.stop)

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


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        _refuse(name, value, "a finite number")


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        _refuse(name, value, "true or false")


def _check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    ok = isinstance(value, int) and not isinstance(value, bool)
    if not ok or value < low or (high is not None and value > high):  # type: ignore[operator]
        limit = f"of at least {low}" if high is None else f"from {low} to {high}"
        _refuse(name, value, f"a whole number {limit}")
