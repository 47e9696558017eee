"""What is measured: prompts as token ids, and how many tokens each request generates."""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass

from cairn.bench.load import draw_requests, draw_tokens, parse_load
from cairn.errors import ConfigError, RequestError
from cairn.eval.haystack import read_text
from cairn.text.tokenizer import Tokenizer

SEEDED_REQUESTS = 256
_REPEATED = 20  # times that the bundled text is repeated: half a million tokens


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    description: str
    prompts: list[list[int]]
    output_lens: list[int]
    one_by_one: bool = False
    """Each request is sent when the one before it has ended."""
    temperature: float = 0.0


def settle_lengths(arguments: argparse.Namespace) -> None:
    """Fill in lengths that were not given; refuse them where the requests have their own."""
    defaults = zip(("input_len", "output_len"), arguments.default_lens, strict=True)
    for name, default in defaults:
        if getattr(arguments, name) is None:
            setattr(arguments, name, default)
        elif getattr(arguments, "lengths", None) == "seeded":
            raise ConfigError(
                f"--{name.replace('_', '-')} has no effect on the seeded requests; "
                "add --lengths equal or mixed"
            )


def make_workload(
    arguments: argparse.Namespace, tokenizer: Tokenizer | None, vocab_size: int
) -> Workload:
    kind, length, output = arguments.kind, arguments.input_len, arguments.output_len
    if kind in ("rag", "summarize"):
        return _over_a_text(arguments, tokenizer)
    count, lengths = arguments.requests, getattr(arguments, "lengths", "equal")
    if lengths == "seeded":
        return seeded(count, vocab_size)
    one_by_one = kind == "latency"
    how = "one by one" if one_by_one else "at once"
    if lengths == "equal":
        draw = random.Random(1)
        inputs, outputs = [length] * count, [output] * count
        text = f"{count} requests {how}, in {length}, out {output}"
    else:  # from an eighth of the given lengths up to them, like requests of different users
        draw = random.Random(2)
        inputs, outputs = (
            [draw.randint(max(1, most // 8), most) for _ in range(count)]
            for most in (length, output)
        )
        text = f"{count} requests {how}, in up to {length}, out up to {output}, mixed"
    prompts = [draw_tokens(draw, vocab_size, tokens) for tokens in inputs]
    return Workload(kind, text, prompts, outputs, one_by_one)


def _over_a_text(arguments: argparse.Namespace, tokenizer: Tokenizer | None) -> Workload:
    """Questions about one document, or its summary."""
    kind, length, output = arguments.kind, arguments.input_len, arguments.output_len
    if tokenizer is None:
        raise ConfigError(f"bench {kind} needs a model with a tokenizer")
    source = read_text(arguments.text) * (_REPEATED if arguments.text is None else 1)
    document: list[int] = list(tokenizer.encode(source[: length * 12])[:length])
    if len(document) < length:
        raise RequestError(
            f"the text has {len(document)} tokens, {length} are needed; give a longer one"
        )
    if kind == "rag":
        count = arguments.requests
        ends = [f"\nQuestion {i}: what does paragraph {i} say?\nAnswer:" for i in range(count)]
        text = f"{count} questions on one corpus of {length} tokens, out {output}"
    else:
        ends = ["\nSummary:"]
        text = f"a document of {length} tokens, out {output}"
    prompts = [document + tokenizer.encode(end) for end in ends]
    return Workload(kind, text, prompts, [output] * len(ends), one_by_one=True)


def seeded(requests: int, vocab_size: int) -> Workload:
    """The 256 requests that small engines compare themselves by; fewer take the first ones."""
    if requests > SEEDED_REQUESTS:
        raise ConfigError(f"--requests is {requests}; there are {SEEDED_REQUESTS} seeded requests")
    (asked,) = draw_requests(parse_load(f"{SEEDED_REQUESTS}x100-1024:100-1024"), 0, 10_001)
    asked = asked[:requests]
    prompts = [[token % vocab_size for token in one.prompt] for one in asked]
    text = f"{requests} of 256 seeded requests, in 100-1024, out 100-1024, temperature 0.6"
    return Workload("offline", text, prompts, [one.output_len for one in asked], temperature=0.6)
