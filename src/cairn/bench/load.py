"""What `cairn bench serve` sends: requests of random token ids, described in a few characters.

A workload has one or more parts, which are sent at the same time. The same seed gives the same
requests.
"""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import dataclass
from typing import Any

from cairn.errors import ConfigError

SYNTAX = (
    "A workload is [COUNTx]IN:OUT[+prefix=N][+concurrency=N][+rate=X]. IN and OUT are tokens of a "
    "prompt and of its answer: a number, or LOW-HIGH, drawn for each request. Without COUNT, IN "
    "may also be a list, one request for each length: 20,100,500. All requests are sent at once, "
    "or concurrency=N of them at a time (1: each alone), or rate=X per second at random moments. "
    "prefix=N puts the same N tokens in front of every prompt. Parts separated by blanks are sent "
    "at the same time."
)
_PART = re.compile(r"(?:(?P<count>[^x:]*)x)?(?P<given>[^x:+]*):(?P<out>[^:+]*)(?P<more>(?:\+.*)?)")
_MOST_COUNT, _MOST_TOKENS = 1_000_000, 100_000_000

Range = tuple[int, int]  # both ends included


@dataclass(frozen=True, slots=True)
class Part:
    """Requests of the same kind."""

    inputs: tuple[Range, ...]
    """Range of the prompt length of each request."""
    output: Range
    listed: bool = False
    """The lengths were given as a list; each is reported on its own."""
    prefix: int = 0
    concurrency: int | None = None
    rate: float | None = None


@dataclass(frozen=True, slots=True)
class Load:
    spec: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Asked:
    """One request."""

    prompt: list[int]
    output_len: int


def parse_load(spec: str) -> Load:
    """Raises ConfigError, which names the field that is wrong."""
    parts = tuple(_parse_part(spec, text) for text in spec.split())
    if not parts:
        raise _error(spec, "it is empty")
    return Load(" ".join(spec.split()), parts)


def draw_requests(load: Load, seed: int, vocab_size: int) -> list[list[Asked]]:
    """The requests of every part, with random lengths and tokens."""
    draw = random.Random(seed)
    parts = []
    for part in load.parts:
        prefix = draw_tokens(draw, vocab_size, part.prefix)
        # In this order the requests of 256x100-1024:100-1024 are those that small engines publish.
        prompts = [
            prefix + draw_tokens(draw, vocab_size, draw.randint(low, high))
            for low, high in part.inputs
        ]
        parts.append([Asked(prompt, draw.randint(*part.output)) for prompt in prompts])
    return parts


def redraw(load: Load, parts: list[list[Asked]], seed: int, vocab_size: int) -> list[list[Asked]]:
    """Requests of the same lengths with other tokens, for which no server has cached anything."""
    draw = random.Random(seed)
    again = []
    for part, asked in zip(load.parts, parts, strict=True):
        prefix = draw_tokens(draw, vocab_size, part.prefix)
        lengths = (len(one.prompt) - part.prefix for one in asked)
        prompts = [prefix + draw_tokens(draw, vocab_size, length) for length in lengths]
        pairs = zip(prompts, asked, strict=True)
        again.append([Asked(prompt, one.output_len) for prompt, one in pairs])
    return again


def draw_tokens(draw: random.Random, vocab_size: int, count: int) -> list[int]:
    return [draw.randrange(vocab_size) for _ in range(count)]


def due_times(part: Part, seed: int) -> list[float]:
    """When each request is to be sent, in seconds from the start."""
    rate, draw = part.rate, random.Random(seed)
    if rate is None:
        return [0.0] * len(part.inputs)
    return list(itertools.accumulate(draw.expovariate(rate) for _ in part.inputs))


def _parse_part(spec: str, text: str) -> Part:
    found = _PART.fullmatch(text)
    if found is None:
        raise _error(spec, f"{text!r} is not of the form COUNTxIN:OUT")
    lengths, count = found["given"].split(","), found["count"]
    listed = len(lengths) > 1
    if listed and count is not None:
        raise _error(spec, "IN is a list with one request for each length; remove COUNT")
    copies = 1 if count is None else _whole(spec, "COUNT", count, _MOST_COUNT)
    inputs = tuple(_tokens(spec, "IN", length) for length in lengths) * copies
    options: dict[str, str] = {}
    for option in found["more"].split("+")[1:]:
        name, _, value = option.partition("=")
        if name not in ("prefix", "concurrency", "rate"):
            raise _error(spec, f"{name!r} is no option; choose among prefix, concurrency, rate")
        if name in options:
            raise _error(spec, f"{name} is given twice; remove one")
        options[name] = value
    if "rate" in options and "concurrency" in options:
        raise _error(spec, "concurrency and rate exclude each other; give one")
    more: dict[str, Any] = {}
    for name, most in (("prefix", _MOST_TOKENS), ("concurrency", _MOST_COUNT)):
        if name in options:
            more[name] = _whole(spec, name, options[name], most)
    if "rate" in options:
        more["rate"] = _rate(spec, options["rate"])
    return Part(inputs, _tokens(spec, "OUT", found["out"]), listed, **more)


def _tokens(spec: str, name: str, text: str) -> Range:
    low, dash, high = text.partition("-")
    first = _whole(spec, name, low, _MOST_TOKENS)
    last = _whole(spec, name, high, _MOST_TOKENS) if dash else first
    if last < first:
        raise _error(spec, f"{name} is {text!r}; write the lower end first")
    return first, last


def _whole(spec: str, name: str, text: str, most: int) -> int:
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text) <= most:
        raise _error(spec, f"{name} is {text!r}; it must be a whole number from 1 to {most}")
    return int(text)


def _rate(spec: str, text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise _error(spec, f"rate is {text!r}; it must be a number above 0")
    return rate


def _error(spec: str, problem: str) -> ConfigError:
    return ConfigError(f"--workload {spec!r}: {problem}; write it like 64x1024-6144:100-300")
