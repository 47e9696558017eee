"""`cairn bench cpu`: Cairn, transformers and llama.cpp on the same GGUF file, in turn.

Each engine is a process of its own. It prints `ready`, reads requests as JSON lines and answers
each with a line: {"prompts", "outputs", "keep"} -> {"seconds", "first", "tokens"}. All prompts are
sent at once. `first` has the seconds to the first token of each, and `tokens` counts all answers'.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Protocol
from urllib.request import Request, urlopen

import torch

from cairn.bench.engines import Arrivals
from cairn.bench.load import draw_tokens
from cairn.bench.measure import TransformersBaseline
from cairn.bench.report import check_files, finish, print_rows, stamp
from cairn.bench.spawned import spawn
from cairn.bench.workloads import Workload as Asked
from cairn.cli_flags import check_at_least
from cairn.engine.sampling_params import SamplingParams
from cairn.errors import ConfigError
from cairn.llm import LLM
from cairn.models.source import find_model

ENGINES = ("cairn", "transformers", "llama.cpp")
_CONTEXT, _SEQUENCES = 4096, 8
_QUESTIONS = 4

Answer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    unit: str
    prompts: tuple[list[int], ...]
    outputs: tuple[int, ...]
    value: Callable[[Answer], float]
    keep: bool = False
    """The prompts are sent one after the other, and share what is cached."""


def workloads(vocab_size: int, scale: float) -> list[Workload]:
    """`scale` shortens all prompts and answers."""
    draw = random.Random(3)

    def length(tokens: int) -> int:
        return max(2, int(tokens * scale))

    def prompt(tokens: int) -> list[int]:
        return draw_tokens(draw, vocab_size, length(tokens))

    mixed = [(draw.randint(16, 128), draw.randint(16, 128)) for _ in range(8)]
    long = prompt(2048)
    return [
        Workload("batch 1", "tok/s", (prompt(32),), (length(64),), _decode_speed),
        Workload(
            "batch 8, equal lengths",
            "tok/s",
            tuple(prompt(32) for _ in range(8)),
            (length(64),) * 8,
            _speed,
        ),
        Workload(
            "batch 8, mixed lengths",
            "tok/s",
            tuple(prompt(tokens) for tokens, _ in mixed),
            tuple(length(tokens) for _, tokens in mixed),
            _speed,
        ),
        Workload("first token of a 2K prompt", "ms", (prompt(2048),), (1,), _first_token),
        Workload(
            "later questions on a 2K prefix",
            "ms",
            tuple([*long, *prompt(24)] for _ in range(1 + _QUESTIONS)),
            (1,) * (1 + _QUESTIONS),
            _first_token,
            keep=True,
        ),
    ]


def _decode_speed(answer: Answer) -> float:
    return float((answer["tokens"] - 1) / (answer["seconds"] - answer["first"][0]))


def _speed(answer: Answer) -> float:
    return float(answer["tokens"] / answer["seconds"])


def _first_token(answer: Answer) -> float:
    return float(1e3 * answer["first"][0])


# -- engines ----------------------------------------------------------------------------------


class Worker:
    """An engine's process."""

    def __init__(self, engine: str, command: list[str], environment: Mapping[str, str]) -> None:
        self._engine = engine
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._expect()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def _expect(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ConfigError(f"the process of {self._engine} has ended; it says why above")
        return line

    def run(self, workload: Workload) -> float:
        if not workload.keep:
            return workload.value(self._ask(workload.prompts, workload.outputs, keep=False))
        answers = [
            self._ask([prompt], [output], keep=number > 0)
            for number, (prompt, output) in enumerate(
                zip(workload.prompts, workload.outputs, strict=True)
            )
        ]
        return median(map(workload.value, answers[1:]))

    def _ask(self, prompts: Sequence[list[int]], outputs: Sequence[int], *, keep: bool) -> Answer:
        assert self._process.stdin is not None
        request = {"prompts": list(prompts), "outputs": list(outputs), "keep": keep}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer: Answer = json.loads(self._expect())
        return answer

    def memory(self) -> float | None:
        return memory(self._process.pid)


def memory(process: int) -> float | None:
    """MB that a process and those it started use, with their share of what is common with others;
    None if the system does not tell."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:  # not Linux
        return None
    (kilobytes,) = (int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return kilobytes / 1e3 + sum(memory(int(child)) or 0 for child in children)


def server_memory(path: str, threads: int) -> float | None:
    """MB that all processes of a `cairn serve` use after an answer."""
    with spawn([f"--model={path}", "--device=cpu", f"--threads={threads}"]) as server:
        url = server.wait_until_ready()
        body = json.dumps({"prompt": [1, 2, 3], "max_tokens": 8}).encode()
        request = Request(f"{url}/completions", body, {"Content-Type": "application/json"})
        with urlopen(request) as answer:
            answer.read()
        return memory(server.pid)


def _start(engine: str, path: str, threads: int) -> Worker:
    if engine == "llama.cpp":
        script = Path(__file__).with_name("llama_worker.py")
        numbers = map(str, (threads, _CONTEXT, _SEQUENCES))
        # Its threads wait as they do by default, not as Cairn lets its own wait.
        environment = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT",)}
        return Worker(engine, [sys.executable, str(script), path, *numbers], environment)
    command = [sys.executable, "-m", "cairn.bench.cpu", engine, path, str(threads)]
    return Worker(engine, command, os.environ)


class _Engine(Protocol):
    def run(self, prompts: list[list[int]], outputs: list[int], keep: bool) -> Answer: ...


class _Cairn:
    def __init__(self, path: str, threads: int) -> None:
        self._llm = LLM(path, device="cpu", threads=threads, kv_cache_gib=0.2)

    def run(self, prompts: list[list[int]], outputs: list[int], keep: bool) -> Answer:
        if not keep:
            self._llm.engine.scheduler.cache.tree.clear()
        arrivals = Arrivals(self._llm)
        begin = time.perf_counter()
        for prompt, most in zip(prompts, outputs, strict=True):
            arrivals.send(prompt, SamplingParams(max_tokens=most, ignore_eos=True, temperature=0))
        arrivals.finish()
        seconds = time.perf_counter() - begin
        return {"seconds": seconds, "first": arrivals.first_tokens(), "tokens": sum(outputs)}


class _Transformers:
    def __init__(self, path: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self._baseline = TransformersBaseline(find_model(path), torch.float32, torch.device("cpu"))

    def run(self, prompts: list[list[int]], outputs: list[int], keep: bool) -> Answer:
        """It has no prefix cache, and a batch answers until its longest answer is complete."""
        asked = Asked("cpu", "", prompts, outputs, one_by_one=len(prompts) == 1)
        measured = self._baseline.measure(asked)
        first = list(measured.first_token)
        return {"seconds": measured.seconds, "first": first, "tokens": measured.output_tokens}


def serve(engine: _Engine) -> None:
    """What an engine's process does."""
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(engine.run(**json.loads(line))), flush=True)


# -- the command ------------------------------------------------------------------------------


def command(arguments: argparse.Namespace) -> int:
    check_at_least(arguments, 1, "repeat")
    check_files(output=arguments.output)
    source = find_model(arguments.model)
    if source.gguf is None:
        raise ConfigError(f"bench cpu needs a GGUF file; --model is {arguments.model}")
    if "llama.cpp" in arguments.engines and find_spec("llama_cpp") is None:
        raise ConfigError(
            "--engines has llama.cpp, whose Python binding is not installed; pip install "
            "llama-cpp-python, or leave it out: --engines cairn,transformers"
        )
    path, threads = str(source.gguf.path), arguments.threads or torch.get_num_threads()
    vocab_size = source.gguf.shapes["model.embed_tokens.weight"][0]
    todo = workloads(vocab_size, arguments.scale)
    values: dict[tuple[str, str], list[float]] = {}
    with ExitStack() as stack:
        workers = {
            engine: stack.enter_context(_start(engine, path, threads))
            for engine in arguments.engines
        }
        for worker in workers.values():
            worker.run(todo[0])  # warm up
        for workload in todo:
            for _ in range(arguments.repeat):  # in turn: all meet the same state of the machine
                for engine, worker in workers.items():
                    values.setdefault((workload.name, engine), []).append(worker.run(workload))
        used = {engine: worker.memory() for engine, worker in workers.items()}
    rows = []
    for workload in todo:
        medians = {engine: median(values[workload.name, engine]) for engine in arguments.engines}
        row: dict[str, Any] = {"workload": workload.name, "unit": workload.unit}
        row |= {engine: round(value, 1) for engine, value in medians.items()}
        for other in arguments.engines:
            if other != "cairn" and "cairn" in medians:
                ratio = medians["cairn"] / medians[other]
                row[f"vs {other}"] = round(ratio if workload.unit == "tok/s" else 1 / ratio, 2)
        row["runs"] = {engine: _rounded(values[workload.name, engine]) for engine in medians}
        rows.append(row)
    rows.append({"workload": "memory of the process", "unit": "MB", **_megabytes(used)})
    if "cairn" in arguments.engines:
        served = {"cairn": server_memory(path, threads)}
        rows.append({"workload": "memory of the server", "unit": "MB", **_megabytes(served)})
    columns = [column for column in rows[0] if column != "runs"]
    record = {"workload": "cpu", "model": path, **stamp(), "threads": threads, "results": rows}
    print_rows(f"{Path(path).name}, {threads} threads", rows, columns)
    finish(record, arguments.output)
    return 0


def _megabytes(sizes: Mapping[str, float | None]) -> dict[str, int | None]:
    return {engine: None if size is None else round(size) for engine, size in sizes.items()}


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 1) for value in values]


if __name__ == "__main__":
    kinds: dict[str, type[_Cairn | _Transformers]] = {
        "cairn": _Cairn,
        "transformers": _Transformers,
    }
    _name, _path, _threads = sys.argv[1:]
    serve(kinds[_name](_path, int(_threads)))
