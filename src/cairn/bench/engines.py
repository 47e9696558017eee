"""Engines under measurement: how they are built, sent requests, stepped and timed."""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch

from cairn.bench.load import draw_tokens
from cairn.bench.report import show_rows
from cairn.cli_flags import collect
from cairn.config import EngineConfig
from cairn.engine.request import Request
from cairn.engine.resolve import resolve_device
from cairn.engine.sampling_params import SamplingParams
from cairn.errors import ConfigError
from cairn.llm import LLM
from cairn.outputs import Chunk, Generation

T = TypeVar("T")
FIRST_TOKEN = SamplingParams(max_tokens=1, ignore_eos=True)
_TELL_EVERY = 5.0  # seconds


@contextmanager
def settled() -> Iterator[None]:
    """Freeze existing objects, as a server does, so that collections inside do not scan them."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def measured(**options: Any) -> Iterator[LLM]:
    """An engine to measure. Its memory is free again afterwards."""
    with LLM(**options) as llm, settled():
        yield llm
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measure_engine(
    name: str, arguments: argparse.Namespace, measure: Callable[[LLM], dict[str, Any]]
) -> int:
    """Build an engine with the given flags, measure it, and show the result beside the flags."""
    options = collect(arguments, EngineConfig)
    with measured(**options) as llm:
        result = measure(llm)
    show_rows(name, [{**result, **options}], arguments.output)
    return 0


def need_cuda(name: str, device: str = "auto") -> None:
    """Raises ConfigError if the device is no GPU."""
    found = resolve_device(device).type
    if found != "cuda":
        raise ConfigError(
            f"bench {name} measures CUDA kernels; it needs a CUDA device, this one is {found}"
        )


def as_subclass(kind: type[T], of: object) -> T:
    """An instance of `kind`, a subclass of the class of `of`, that shares all its state. It
    replaces a part of a running engine by one that does one thing differently."""
    assert issubclass(kind, type(of))
    own = kind.__new__(kind)
    vars(own).update(vars(of))
    return own


def random_prompt(llm: LLM, tokens: int, seed: int) -> list[int]:
    return draw_tokens(random.Random(seed), llm.engine.spec.vocab_size, tokens)


def first_token(llm: LLM, prompts: Sequence[Sequence[int]]) -> float:
    """Seconds until each of the prompts has its first token."""
    frontend = llm.frontend
    requests = [one for prompt in prompts for one in frontend.prepare(prompt, FIRST_TOKEN)]
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begin = time.perf_counter()
    frontend.submit(requests)
    step_to_first_tokens(llm, requests)
    return time.perf_counter() - begin


def step_to_first_tokens(llm: LLM, requests: Sequence[Request]) -> None:
    """Step until each request has its first token. Long prompts tell how far they are."""
    begin = told = time.perf_counter()
    while not all(request.num_output for request in requests):
        llm.frontend.step()
        now = time.perf_counter()
        if now - told >= _TELL_EVERY:
            told = now
            done = sum(min(request.computed, request.prompt_len) for request in requests)
            whole = sum(request.prompt_len for request in requests)
            so_far = f"{done} of {whole} prompt tokens after {now - begin:.1f} s"
            print(so_far, file=sys.stderr, flush=True)


class Arrivals:
    """Sends prompts, and keeps when each was sent and when its tokens arrived."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.requests: list[Request] = []
        self.results: list[Generation] = []
        self.moments: dict[str, list[float]] = {}
        """By request id: when it was sent, and when each chunk of its answer arrived."""

    def send(
        self, prompt: Sequence[int], params: SamplingParams, due: float | None = None
    ) -> Request:
        """Submit a prompt. Its clock starts now, or when it was due."""
        sent = time.perf_counter() if due is None else due
        (request,) = self._llm.frontend.prepare(prompt, params)
        self.requests.append(request)
        self.moments[request.id] = [sent]
        self._llm.frontend.submit([request], self._keep)
        return request

    def _keep(self, chunk: Chunk | Exception) -> None:
        if isinstance(chunk, Exception):
            raise chunk
        self.moments[chunk.request_id].append(time.perf_counter())
        if chunk.result is not None:
            self.results.append(chunk.result)

    def step_until(self, tokens: int, *requests: Request) -> None:
        """Step until each of the requests has so many tokens."""
        while min(len(self.moments[request.id]) for request in requests) <= tokens:
            self._llm.frontend.step()

    def finish(self) -> None:
        """Step until every answer is complete."""
        while len(self.results) < len(self.requests):
            self._llm.frontend.step()

    def first_tokens(self) -> list[float]:
        """Seconds to the first token of each request."""
        return [first - sent for sent, first, *_ in self.moments.values()]

    def gaps(self) -> np.ndarray:
        """Seconds between two tokens of one request, of all requests."""
        return np.concatenate([np.diff(moments[1:]) for moments in self.moments.values()])


class Running:
    """Requests that generate endlessly, each with its own context."""

    def __init__(self, llm: LLM, context: int, max_tokens: int) -> None:
        self._llm = llm
        self._context = context
        self._params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self.requests: list[Request] = []

    def grow_to(self, count: int) -> float:
        """Grow to `count` running requests; returns the seconds that took, without those that it
        took to draw their prompts."""
        prompts = [
            random_prompt(self._llm, self._context, seed)
            for seed in range(len(self.requests), count)
        ]
        begin = time.perf_counter()
        for prompt in prompts:
            new = self._llm.frontend.prepare(prompt, self._params)
            self._llm.frontend.submit(new)
            self.requests += new
        step_to_first_tokens(self._llm, self.requests)
        return time.perf_counter() - begin

    def step_gaps(self, warm: int, steps: int) -> np.ndarray:
        """Seconds from one step to the next, since steps overlap. `warm` steps come before."""
        moments = []
        for _ in range(warm + steps):
            self._llm.frontend.step()
            moments.append(time.perf_counter())
        return np.diff(moments[warm - 1 :])

    def end(self) -> None:
        self._llm.frontend.abort_all()
        self.requests.clear()
