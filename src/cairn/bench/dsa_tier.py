"""`cairn bench dsa --parts tier`: decode steps with rows in host memory, at given miss rates.

Random weights select other rows with every token, which no cache could serve. So each row's
selection is scripted: the past is divided into k equal parts, a query reads one row of each, and a
given share of them changes with every token. Index scan and selection run all the same, and their
result is not used. Contexts are made up: no prompt is computed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from cairn.attention.dsa_backend import DSABackend
from cairn.bench.engines import as_subclass, measured
from cairn.config import EngineConfig
from cairn.engine.inputs import StepInputs
from cairn.engine.locate import locate
from cairn.kernels.packing import table_width
from cairn.llm import LLM
from cairn.memory.copies import CopyEdits, Transfer
from cairn.memory.row_swap import RowSwap
from cairn.models.registry import read_spec

Rows = Iterator[dict[str, Any]]
_PAGE = 64
_WARM, _TIMED = 24, 40  # steps
_SMALL = (1, 2, 4)
_SHORT = 8192  # tokens of a context that is on the device


class ScriptedRows(RowSwap):
    """Looks up scripted rows instead of those that queries selected."""

    script: dict[int, torch.Tensor]  # by layer, [steps, seqs, k] int32 positions
    at: torch.Tensor  # [1] the step
    copies: bool = True

    def locate(
        self,
        layer: int,
        positions: torch.Tensor,
        seqs: torch.Tensor,
        page_table: torch.Tensor,
        generations: torch.Tensor,
        places: torch.Tensor,
    ) -> None:
        drawn = self.script[layer].index_select(0, self.at)[0, : len(positions)]
        super().locate(layer, drawn, seqs, page_table, generations, places)

    def _copy(self, layer: int, places: torch.Tensor | None) -> None:
        if not self.copies:
            self._scratch.num_tasks.zero_()
        super()._copy(layer, places)
        if not self.copies and places is not None:
            places.clamp_(min=-1)  # rows that are not there are not read


def tier_steps(
    model: str,
    contexts: int,
    running: int,
    length: int,
    rates: Sequence[float],
    device: torch.device,
) -> Rows:
    """Steps of `running` sequences, on a device with memory for `contexts` whole ones, and of those
    ones without a tier."""
    spec = read_spec(locate(EngineConfig(model=model)).config)
    groups = spec.groups(torch.bfloat16)
    pages = -(-(length + 1) // _PAGE)
    page_bytes = sum(group.page_bytes(_PAGE) for group in groups)
    staying = sum(group.staying_bytes(_PAGE) for group in groups)
    budget = (contexts * pages + 1) * page_bytes / 2**30
    host = (running * pages + 1) * (page_bytes - staying) / 2**30
    row: dict[str, Any] = {"length": length, "kv_gib": round(budget, 2)}
    short = min(length, _SHORT)
    with _engine(model, budget, max(contexts, *_SMALL), length, device) as llm:
        alone = [_untiered(llm, count, short) for count in _SMALL]
        base = _untiered(llm, contexts, length)
    speed = contexts / base
    yield {**row, "running": contexts, "ms": round(1e3 * base, 3), "tokens_per_s": round(speed)}
    with _engine(model, budget, running, length, device, host_gib=host) as llm:
        frames = llm.engine.scheduler.cache.allocators[-1].num_pages
        seqs = min(running, llm.engine.scheduler.limits.max_running_requests)
        for count, theirs in zip(_SMALL, alone, strict=True):
            if count * -(-short // _PAGE) > frames:
                yield {"length": short, "running": count, "left_out": f"{frames} pages fit"}
                continue
            ours = _resident(llm, count, short)
            yield {
                "length": short,
                "running": count,
                "all on the device": True,
                "ms": round(1e3 * ours, 4),
                "untiered_ms": round(1e3 * theirs, 4),
                "time with / without": round(ours / theirs, 4),
            }
        for rate, copies in (*((rate, True) for rate in rates), (rates[-1], False)):
            own = _scripted(llm, seqs, length, rate, copies=copies)
            ratio = round(own["tokens_per_s"] / speed, 2)
            yield {**row, "running": seqs, **own, "with / without": ratio}


@contextmanager
def _engine(
    model: str,
    gib: float,
    running: int,
    length: int,
    device: torch.device,
    host_gib: float | None = None,
) -> Iterator[LLM]:
    options: dict[str, Any] = {}
    if device.type == "cuda":  # each step is recorded below, at its own length
        options["disable_cuda_graph"] = True
    if host_gib is not None:
        options["enable_hisparse"] = True
        options["hisparse_config"] = json.dumps({"host_gib": host_gib})
    with measured(
        model=model,
        load_format="dummy",
        dtype="bfloat16",
        device=device.type,
        page_size=_PAGE,
        context_length=length + 1,
        max_running_requests=running,
        kv_cache_gib=gib,
        **options,
    ) as llm:
        yield llm


def _table(seqs: int, length: int) -> np.ndarray:
    """Pages of sequences, scattered: [seqs, pages]."""
    pages = -(-length // _PAGE)
    order = 1 + np.random.default_rng(0).permutation(seqs * pages)
    table = np.zeros((seqs, table_width(pages)), dtype=np.int32)
    table[:, :pages] = order.reshape(seqs, pages)
    return table


def _step(
    llm: LLM, tables: list[np.ndarray], length: int, *, resident: bool = False
) -> Callable[[], Any]:
    """A decode step of sequences of one length, with these tables of all groups."""
    runner, seqs = llm.engine.runner, len(tables[0])
    lens = np.ones(seqs, dtype=np.int64), np.full(seqs, length)
    inputs = StepInputs.made_up(_PAGE, *lens, tables, resident=resident).send(
        runner.stepper.device, runner.stepper.reads_generations
    )
    metadata = runner.stepper.backend.prepare(inputs.batch)
    return lambda: runner.stepper.forward(inputs, metadata, None)


def _untiered(llm: LLM, seqs: int, length: int) -> float:
    groups = len(llm.engine.runner.tables.pages)
    step = _step(llm, [_table(seqs, length)] * groups, length)
    return _seconds(step, llm.engine.runner.stepper.device)


def _resident(llm: LLM, seqs: int, length: int) -> float:
    """Seconds of a step whose pages are all in frames."""
    tier, table = llm.engine.runner.tier, _table(seqs, length)
    assert tier is not None
    _place(llm, {int(page): int(page) for page in table[table > 0]})
    step = _step(llm, [table, table], length, resident=True)
    return _seconds(step, llm.engine.runner.stepper.device)


def _scripted(
    llm: LLM, seqs: int, length: int, rate: float, *, copies: bool = True
) -> dict[str, Any]:
    """A step whose sequences have only their last page in a frame."""
    runner = llm.engine.runner
    tier, backend = runner.tier, runner.stepper.backend
    assert tier is not None and tier.row_swap is not None
    assert isinstance(backend, DSABackend) and backend._kernels is not None
    swap = as_subclass(ScriptedRows, tier.row_swap)
    swap.copies = copies
    device, sparse = runner.stepper.device, backend._parts.config
    generator = torch.Generator(device).manual_seed(0)
    swap.at = torch.zeros(1, dtype=torch.int64, device=device)
    swap.script = {
        layer: _draw(_WARM + _TIMED, seqs, sparse.topk, length - _PAGE, rate, generator)
        for layer in sparse.layers
    }
    tier.forget()
    table = _table(seqs, length)
    last = -(-length // _PAGE) - 1
    in_frames = np.zeros_like(table)
    in_frames[:, last] = np.arange(1, seqs + 1)
    _place(llm, {int(page): s + 1 for s, page in enumerate(table[:, last])})
    backend._kernels._swap = swap
    before: list[int] = []
    try:
        call = _step(llm, [table, in_frames], length)

        def step() -> None:
            call()
            swap.at += 1

        def warm() -> None:
            before.extend(swap.totals)

        seconds = _seconds(step, device, warm)
    finally:
        backend._kernels._swap = tier.row_swap
    every, hits, misses = (b - a for a, b in zip(before, swap.totals, strict=True))
    row_bytes = tier._slice_bytes
    return {
        "changed": rate,
        "copies": copies,
        "missed": round(misses / max(1, every + hits + misses), 4),
        "mb_in_per_step": round(misses * row_bytes / _TIMED / 1e6, 2) if copies else 0.0,
        "ms": round(1e3 * seconds, 3),
        "tokens_per_s": round(seqs / seconds),
    }


def _draw(
    steps: int, seqs: int, k: int, length: int, rate: float, generator: torch.Generator
) -> torch.Tensor:
    """Positions [steps, seqs, k]: one of each of k parts of the past, of which a share changes with
    every step."""
    device = generator.device
    edges = torch.linspace(0, length, k + 1, dtype=torch.float64, device=device).long()
    begin, size = edges[:-1], edges.diff()
    drawn = torch.rand(steps, seqs, k, generator=generator, device=device)
    moves = torch.rand(steps, seqs, k, generator=generator, device=device) < rate
    positions = (begin + (drawn * size).long()).int()
    for step in range(1, steps):
        positions[step] = torch.where(moves[step], positions[step], positions[step - 1])
    return positions


def _place(llm: LLM, frames: dict[int, int]) -> None:
    """Put these pages, and no others, into frames."""
    tier = llm.engine.runner.tier
    assert tier is not None
    here = np.flatnonzero(tier.frames).tolist()
    tier.begin_step(CopyEdits(tuple(Transfer(page, 0) for page in here)))
    tier.begin_step(CopyEdits(tuple(Transfer(*own) for own in frames.items())))


def _seconds(
    call: Callable[[], Any], device: torch.device, warm: Callable[[], None] = lambda: None
) -> float:
    """Mean seconds of a recorded step, after some that are not timed and after `warm`."""
    with torch.inference_mode():
        call()
        replay = _recorded(call) if device.type == "cuda" else call
        for _ in range(_WARM - 1):
            replay()
        _wait(device)
        warm()
        begin = time.perf_counter()
        for _ in range(_TIMED):
            replay()
        _wait(device)
        return (time.perf_counter() - begin) / _TIMED


def _recorded(call: Callable[[], Any]) -> Callable[[], Any]:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
