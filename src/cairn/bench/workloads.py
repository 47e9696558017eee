"""What is measured: prompts as token ids, and how many tokens each request generates."""

from __future__ import annotations

import argparse
import ast
import random
import sys
from dataclasses import dataclass
from pathlib import Path

from cairn.bench.load import draw_requests, parse_load
from cairn.errors import ConfigError, RequestError
from cairn.eval import haystack
from cairn.text.tokenizer import Tokenizer

SEEDED_REQUESTS = 256


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
    count = getattr(arguments, "requests", 1)
    if kind == "offline" and arguments.lengths == "seeded":
        return seeded(count, vocab_size)
    if kind == "offline" and arguments.lengths == "mixed":
        return _mixed(count, length, output, vocab_size)
    if kind in ("latency", "offline"):
        how = "one by one" if kind == "latency" else "at once"
        text = f"{count} requests {how}, in {length}, out {output}"
        prompts = _random_prompts([length] * count, vocab_size, random.Random(1))
        return Workload(kind, text, prompts, [output] * count, one_by_one=kind == "latency")
    if tokenizer is None:
        raise ConfigError(f"bench {kind} needs a model with a tokenizer")
    source = read_text(arguments.text)
    document: list[int] = list(tokenizer.encode(source[: length * 12])[:length])
    if len(document) < length:
        raise RequestError(
            f"the text has {len(document)} tokens, {length} are needed; give a longer one"
        )
    if kind == "rag":
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
    prompts = [one.prompt for one in asked[:requests]]
    if vocab_size <= 10_000:
        prompts = [[token % vocab_size for token in prompt] for prompt in prompts]
    text = f"{requests} of 256 seeded requests, in 100-1024, out 100-1024, temperature 0.6"
    outputs = [one.output_len for one in asked[:requests]]
    return Workload("offline", text, prompts, outputs, temperature=0.6)


def _mixed(requests: int, input_len: int, output_len: int, vocab_size: int) -> Workload:
    """Lengths from an eighth of the given ones up to them, like requests of different users."""
    draw = random.Random(2)
    lengths, outputs = (
        [draw.randint(max(1, most // 8), most) for _ in range(requests)]
        for most in (input_len, output_len)
    )
    text = f"{requests} requests at once, in up to {input_len}, out up to {output_len}, mixed"
    return Workload("offline", text, _random_prompts(lengths, vocab_size, draw), outputs)


def _random_prompts(lengths: list[int], vocab_size: int, draw: random.Random) -> list[list[int]]:
    return [[draw.randrange(vocab_size) for _ in range(length)] for length in lengths]


def read_text(path: str | None) -> str:
    """The user's text, or the docstrings of the standard library, which every Python has."""
    if path is not None:
        return haystack.read_text(path)
    pieces: list[str] = []
    for name in sorted(sys.stdlib_module_names):
        source = Path(random.__file__).parent / f"{name}.py"
        if not source.exists():
            continue
        nodes = ast.walk(ast.parse(source.read_text(encoding="utf-8")))
        documented = (
            n for n in nodes if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef)
        )
        pieces += [text for node in documented if (text := ast.get_docstring(node))]
        if sum(map(len, pieces)) > 2_000_000:
            break
    return "\n\n".join(pieces)
