"""What is measured: prompts as token ids, and how many tokens each is to generate."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cairn.errors import ConfigError, RequestError
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

    @property
    def total_output(self) -> int:
        return sum(self.output_lens)


def seeded(requests: int, vocab_size: int) -> Workload:
    """The 256 requests that small engines compare themselves by; fewer take the first ones."""
    draw = random.Random(0)
    prompts = [
        [draw.randint(0, 10_000) for _ in range(draw.randint(100, 1024))]
        for _ in range(SEEDED_REQUESTS)
    ]
    outputs = [draw.randint(100, 1024) for _ in range(SEEDED_REQUESTS)]
    if vocab_size <= 10_000:
        prompts = [[token % vocab_size for token in prompt] for prompt in prompts]
    return Workload(
        "offline",
        f"{requests} of 256 seeded requests, in 100-1024, out 100-1024, temperature 0.6",
        prompts[:requests],
        outputs[:requests],
        temperature=0.6,
    )


def uniform(requests: int, input_len: int, output_len: int, vocab_size: int) -> Workload:
    draw = random.Random(1)
    prompts = [[draw.randrange(vocab_size) for _ in range(input_len)] for _ in range(requests)]
    return Workload(
        "offline",
        f"{requests} requests at once, in {input_len}, out {output_len}",
        prompts,
        [output_len] * requests,
    )


def mixed(requests: int, input_len: int, output_len: int, vocab_size: int) -> Workload:
    """Lengths from an eighth of the given ones up to them, as a batch of strangers has."""
    draw = random.Random(2)
    lengths = [draw.randint(max(1, input_len // 8), input_len) for _ in range(requests)]
    outputs = [draw.randint(max(1, output_len // 8), output_len) for _ in range(requests)]
    return Workload(
        "offline",
        f"{requests} requests at once, in up to {input_len}, out up to {output_len}, mixed",
        [[draw.randrange(vocab_size) for _ in range(length)] for length in lengths],
        outputs,
    )


def latency(requests: int, input_len: int, output_len: int, vocab_size: int) -> Workload:
    base = uniform(requests, input_len, output_len, vocab_size)
    return Workload(
        "latency",
        f"{requests} requests one by one, in {input_len}, out {output_len}",
        base.prompts,
        base.output_lens,
        one_by_one=True,
    )


def rag(
    tokenizer: Tokenizer, text: str, corpus_len: int, questions: int, output_len: int
) -> Workload:
    """One corpus, many questions about it, one after the other."""
    corpus = _cut(tokenizer, text, corpus_len)
    prompts = [
        corpus + tokenizer.encode(f"\nQuestion {i}: what does paragraph {i} say?\nAnswer:")
        for i in range(questions)
    ]
    return Workload(
        "rag",
        f"{questions} questions on one corpus of {corpus_len} tokens, out {output_len}",
        prompts,
        [output_len] * questions,
        one_by_one=True,
    )


def summarize(tokenizer: Tokenizer, text: str, document_len: int, output_len: int) -> Workload:
    """One long document, one long answer."""
    prompt = _cut(tokenizer, text, document_len) + tokenizer.encode("\nSummary:")
    return Workload(
        "summarize",
        f"a document of {document_len} tokens, out {output_len}",
        [prompt],
        [output_len],
        one_by_one=True,
    )


def read_text(path: str | None) -> str:
    """The user's text, or text that ships with Python itself."""
    if path is None:
        return _python_text()
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {path} cannot be read: {error}") from error


def _python_text() -> str:
    """The docstrings of the standard library, which every Python has."""
    import ast

    pieces = []
    for name in sorted(sys.stdlib_module_names):
        path = Path(random.__file__).parent / f"{name}.py"
        if not path.exists():
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node)
                if text:
                    pieces.append(text)
        if sum(map(len, pieces)) > 2_000_000:
            break
    return "\n\n".join(pieces)


def _cut(tokenizer: Tokenizer, text: str, length: int) -> list[int]:
    ids: Sequence[int] = tokenizer.encode(text[: length * 12])
    if len(ids) < length:
        raise RequestError(
            f"the text has {len(ids)} tokens, {length} are needed; give a longer one"
        )
    return list(ids[:length])
