"""What `cairn bench serve` sends: requests of token ids, described in a few characters.

A workload is one part or several, which are sent at the same time. The requests of a workload are
the same in every run with the same seed.
"""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import dataclass

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
    """Requests that are alike."""

    inputs: tuple[Range, ...]
    """One for each request."""
    output: Range
    listed: bool = False
    """The lengths were listed one by one, and are reported so."""
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
    """The requests of every part. Lengths come from the first generator alone, so that other
    tokens of the same shapes can be had from `redraw`."""
    draw = random.Random(seed)
    parts = []
    for part in load.parts:
        prefix = [draw.randrange(vocab_size) for _ in range(part.prefix)]
        # In this order the requests of 256x100-1024:100-1024 are those that small engines publish.
        prompts = [
            prefix + [draw.randrange(vocab_size) for _ in range(draw.randint(low, high))]
            for low, high in part.inputs
        ]
        parts.append([Asked(prompt, draw.randint(*part.output)) for prompt in prompts])
    return parts


def redraw(load: Load, parts: list[list[Asked]], seed: int, vocab_size: int) -> list[list[Asked]]:
    """Requests of the same lengths with other tokens, for which no server has cached anything."""
    draw = random.Random(seed)
    again = []
    for part, asked in zip(load.parts, parts, strict=True):
        prefix = [draw.randrange(vocab_size) for _ in range(part.prefix)]
        again.append(
            [
                Asked(
                    prefix
                    + [draw.randrange(vocab_size) for _ in range(len(one.prompt) - part.prefix)],
                    one.output_len,
                )
                for one in asked
            ]
        )
    return again


def due_times(part: Part, seed: int) -> list[float]:
    """When each request is to be sent, in seconds from the start."""
    if part.rate is None:
        return [0.0] * len(part.inputs)
    draw = random.Random(seed)
    rate = part.rate
    return list(itertools.accumulate(draw.expovariate(rate) for _ in part.inputs))


def _parse_part(spec: str, text: str) -> Part:
    found = _PART.fullmatch(text)
    if found is None:
        raise _error(spec, f"{text!r} is not of the form COUNTxIN:OUT")
    listed = "," in found["given"]
    if listed:
        if found["count"] is not None:
            raise _error(spec, "IN is a list with one request for each length; remove COUNT")
        inputs = tuple(_tokens(spec, "IN", length) for length in found["given"].split(","))
    else:
        count = 1
        if found["count"] is not None:
            count = _whole(spec, "COUNT", found["count"], 1, _MOST_COUNT)
        inputs = (_tokens(spec, "IN", found["given"]),) * count
    options = _options(spec, found["more"])
    prefix = concurrency = None
    rate = None
    if "prefix" in options:
        prefix = _whole(spec, "prefix", options["prefix"], 1, _MOST_TOKENS)
    if "concurrency" in options:
        concurrency = _whole(spec, "concurrency", options["concurrency"], 1, _MOST_COUNT)
    if "rate" in options:
        if concurrency is not None:
            raise _error(spec, "concurrency and rate exclude each other; give one")
        rate = _rate(spec, options["rate"])
    return Part(inputs, _tokens(spec, "OUT", found["out"]), listed, prefix or 0, concurrency, rate)


def _options(spec: str, text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for option in text.split("+")[1:]:
        name, _, value = option.partition("=")
        if name not in ("prefix", "concurrency", "rate"):
            raise _error(spec, f"{name!r} is no option; choose among prefix, concurrency, rate")
        if name in found:
            raise _error(spec, f"{name} is given twice; remove one")
        found[name] = value
    return found


def _tokens(spec: str, name: str, text: str) -> Range:
    low, dash, high = text.partition("-")
    first = _whole(spec, name, low, 1, _MOST_TOKENS)
    last = _whole(spec, name, high, 1, _MOST_TOKENS) if dash else first
    if last < first:
        raise _error(spec, f"{name} is {text!r}; write the lower end first")
    return first, last


def _whole(spec: str, name: str, text: str, low: int, high: int) -> int:
    if not (text.isascii() and text.isdigit()) or not low <= int(text) <= high:
        raise _error(spec, f"{name} is {text!r}; it must be a whole number from {low} to {high}")
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
