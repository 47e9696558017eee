"""Two checkouts of Cairn side by side, in one run on one machine.

    git worktree add ../old COMMIT
    python benchmarks/commits.py --tree old=../old --tree new=. --parts offline,hils,tier

Each tree runs in its own process. Both build the same engine, then take turns: one measures while
the other waits. Reported are the median of each tree, the ratio of the medians, and the spread of
each tree's own runs (largest / smallest).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

_ENGINES: dict[str, dict[str, Any]] = {
    "cpu": {"model": "smollm2"},
    "offline": {"model": "qwen3-0.6b", "load_format": "dummy", "context_length": 4096},
    "hils": {"model": "hils-345m", "load_format": "dummy", "context_length": 140_000},
    "tier": {
        "model": "qwen3-0.6b-long",
        "load_format": "dummy",
        "context_length": 140_000,
        "attention_backend": "hsa",
        "hsa_policy": "quest",
        "enable_hisparse": True,
        "hisparse_config": '{"host_gib": 34}',
        "kv_cache_gib": 8,
        "chunked_prefill_size": 16_384,
    },
}
# What is measured with each engine: name, kind, prompt tokens, requests.
_CASES: dict[str, Sequence[tuple[str, str, int, int]]] = {
    "cpu": [("64 tokens/s, 1 request", "rate", 32, 1), ("64 tokens/s, 8 requests", "rate", 32, 8)],
    "offline": [
        ("256 requests, tokens/s", "seeded", 0, 256),
        ("step of 1 x 256, ms", "step", 256, 1),
    ],
    "hils": [
        ("prompt of 8K, ms", "prompt", 8192, 1),
        ("prompt of 128K, ms", "prompt", 131_072, 1),
        ("step of 1 x 8K, ms", "step", 8192, 1),
        ("step of 1 x 128K, ms", "step", 131_000, 1),
    ],
    "tier": [
        ("prompt of 32K, ms", "prompt", 32_768, 1),
        ("step of 1 x 128K, ms", "step", 130_000, 1),
    ],
}
_STEPS = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tree", action="append", required=True, metavar="LABEL=FOLDER")
    parser.add_argument("--parts", default="offline,hils,tier", help=f"Of {', '.join(_ENGINES)}.")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--kv-cache-gib", type=float, default=40.0, help="Of each tree's engine.")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        _serve_measurements(arguments.worker, arguments.kv_cache_gib)
        return
    trees = dict(tree.split("=", 1) for tree in arguments.tree)
    for part in arguments.parts.split(","):
        workers = {label: _Worker(part, folder) for label, folder in trees.items()}
        ready = {label: worker.answer() for label, worker in workers.items()}
        print(json.dumps({"part": part, "ready_s": ready}), flush=True)
        for case in _CASES[part]:
            times: dict[str, list[float]] = {label: [] for label in workers}
            for turn in range(arguments.repeat + 1):
                order = list(workers) if turn % 2 else list(reversed(workers))
                for label in order:
                    value = workers[label].ask({"case": case, "seed": turn})
                    if turn:  # the first turn warms up
                        times[label].append(value)
            print(json.dumps({"part": part, "case": case[0], **_summary(times)}), flush=True)
        for worker in workers.values():
            worker.close()


def _summary(times: dict[str, list[float]]) -> dict[str, Any]:
    medians = {label: statistics.median(values) for label, values in times.items()}
    first, *others = medians
    return {
        "median": {label: round(value, 3) for label, value in medians.items()},
        "ratio": {label: round(medians[label] / medians[first], 4) for label in others},
        "spread": {label: round(max(values) / min(values), 4) for label, values in times.items()},
    }


class _Worker:
    """A process that holds one tree's engine and measures when asked."""

    def __init__(self, part: str, folder: str) -> None:
        source = Path(folder).resolve() / "src"
        environment = {**os.environ, "PYTHONPATH": f"{source}:{os.environ.get('PYTHONPATH', '')}"}
        command = [sys.executable, __file__, "--tree", "x=y", "--worker", part]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )

    def ask(self, question: dict[str, Any]) -> float:
        _pipe(self._process.stdin).write(json.dumps(question) + "\n")
        _pipe(self._process.stdin).flush()
        return self.answer()

    def answer(self) -> float:
        line = _pipe(self._process.stdout).readline()
        if not line:
            raise SystemExit("a worker ended; see its output above")
        return float(json.loads(line))

    def close(self) -> None:
        _pipe(self._process.stdin).close()
        self._process.wait()


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def _serve_measurements(part: str, kv_cache_gib: float) -> None:
    from cairn import LLM

    answers, sys.stdout = sys.stdout, sys.stderr
    begin = time.perf_counter()
    options = dict(_ENGINES[part])
    if part != "cpu":
        options.setdefault("kv_cache_gib", kv_cache_gib)
    with LLM(**options) as llm:
        print(round(time.perf_counter() - begin, 1), file=answers, flush=True)
        for line in sys.stdin:
            question = json.loads(line)
            _, kind, tokens, requests = question["case"]
            if kind != "step":  # a step's prompt may be cached
                llm.engine.scheduler.cache.tree.clear()
            value = _MEASURES[kind](llm, tokens, requests, question["seed"])
            print(json.dumps(value), file=answers, flush=True)


def _prompts(seed: int, tokens: int, requests: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [draw.choices(range(100, 10_000), k=tokens) for _ in range(requests)]


def _finish(llm: Any, prompts: list[list[int]], lengths: list[int], temperature: float) -> float:
    """Seconds until all requests have ended."""
    from cairn import SamplingParams

    requests = []
    for prompt, length in zip(prompts, lengths, strict=True):
        params = SamplingParams(max_tokens=length, ignore_eos=True, temperature=temperature)
        requests += llm.frontend.prepare(prompt, params)
    begin = time.perf_counter()
    llm.frontend.submit(requests)
    while llm.engine.has_work:
        llm.frontend.step()
    return time.perf_counter() - begin


def _seeded(llm: Any, _tokens: int, requests: int, _seed: int) -> float:
    draw = random.Random(0)
    inputs, outputs = ([draw.randint(100, 1024) for _ in range(requests)] for _ in range(2))
    prompts = [draw.choices(range(10_000), k=length) for length in inputs]
    return sum(outputs) / _finish(llm, prompts, outputs, 0.6)


def _rate(llm: Any, tokens: int, requests: int, seed: int) -> float:
    return 64 * requests / _finish(llm, _prompts(seed, tokens, requests), [64] * requests, 0.0)


def _prompt(llm: Any, tokens: int, requests: int, seed: int) -> float:
    return 1e3 * _finish(llm, _prompts(seed, tokens, requests), [1] * requests, 0.0)


def _step(llm: Any, tokens: int, requests: int, seed: int) -> float:
    """Milliseconds of one decode step."""
    from cairn import SamplingParams

    frontend = llm.frontend
    params = SamplingParams(max_tokens=_STEPS + 60, ignore_eos=True)
    asked = [one for p in _prompts(0, tokens, requests) for one in frontend.prepare(p, params)]
    frontend.submit(asked)
    while not all(request.num_output for request in asked):
        frontend.step()
    for _ in range(20):
        frontend.step()
    begin = time.perf_counter()
    for _ in range(_STEPS):
        frontend.step()
    spent = time.perf_counter() - begin
    frontend.abort_all()
    while llm.engine.has_work:
        frontend.step()
    return 1e3 * spent / _STEPS


_MEASURES: dict[str, Callable[[Any, int, int, int], float]] = {
    "seeded": _seeded,
    "rate": _rate,
    "prompt": _prompt,
    "step": _step,
}

if __name__ == "__main__":
    main()
