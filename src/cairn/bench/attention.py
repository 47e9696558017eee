"""`cairn bench attention`: every attention backend that runs here, side by side."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import torch

from cairn.attention.backend import AttentionShape, backend_names, dense_class, refusal
from cairn.attention.latent import LatentHeads
from cairn.attention.widened import dense_backend
from cairn.bench.engines import need_cuda
from cairn.bench.report import show_rows, tell
from cairn.engine.inputs import StepInputs
from cairn.kernels.fp8_rows import CACHE_TYPES, FP8
from cairn.memory.groups import group_layers
from cairn.memory.kv_pool import KVPool
from cairn.memory.layout import CacheLayout

PAGE_SIZE = 64
_FILLED = 1024  # pages at once
_LATENT_HEAD = 128  # columns of a head's value, and of its key without the rotated part


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    num_heads: int
    kv_heads: int
    head_dim: int
    new_rows: int
    length: int
    seqs: int
    latent: int | None = None
    """Rows of the cache are latent; values are so many of their columns."""
    dtype: torch.dtype = torch.bfloat16
    """Of the cache."""

    @property
    def kv_bytes(self) -> int:
        return self.seqs * self.layout.page_bytes(self.length)

    @property
    def layout(self) -> CacheLayout:
        if self.latent is not None:
            return CacheLayout.of_latents(self.head_dim).of_type(self.dtype)
        return CacheLayout.of_heads(self.kv_heads, self.head_dim, self.dtype)

    @property
    def flops(self) -> float:
        pairs = self.new_rows * self.length - self.new_rows * (self.new_rows - 1) / 2
        """Of latent rows, in absorbed form for decode and in expanded form for prompts."""
        columns = self.head_dim + (self.latent or self.head_dim)
        if self.latent is not None and self.new_rows > 1:
            columns = 2 * _LATENT_HEAD + self.head_dim - self.latent
        return 2.0 * self.seqs * pairs * self.num_heads * columns


_HEADS = (
    Case("decode 256 x 1K, 16/8x128", 16, 8, 128, 1, 1024, 256),
    Case("decode 32 x 32K, 16/8x128", 16, 8, 128, 1, 32768, 32),
    Case("decode 1 x 128K, 16/8x128", 16, 8, 128, 1, 131072, 1),
    Case("decode 16 x 64K, 16/2x128", 16, 2, 128, 1, 65536, 16),
    Case("prefill 8K, 16/8x128", 16, 8, 128, 8192, 8192, 1),
    Case("prefill 32K, 16/2x64", 16, 2, 64, 32768, 32768, 1),
    Case("extend 2K on 32K, 16/8x128", 16, 8, 128, 2048, 34816, 1),
)
_LATENTS = (
    *(
        Case(f"MLA decode {seqs} x {length // 1024}K, 128x576", 128, 1, 576, 1, length, seqs, 512)
        for length in (8192, 65536)
        for seqs in (1, 16, 64)
    ),
    Case("MLA decode 64 x 8K, 16x576", 16, 1, 576, 1, 8192, 64, 512),
    Case("MLA prefill 8K, 128x576", 128, 1, 576, 8192, 8192, 1, 512),
    Case("MLA extend 128 on 8K, 128x576", 128, 1, 576, 128, 8320, 1, 512),
    Case("MLA extend 512 on 8K, 128x576", 128, 1, 576, 512, 8704, 1, 512),
)
CASES = (
    *_HEADS,
    *_LATENTS,
    *(
        replace(case, name=f"{case.name}, {name}", dtype=dtype)
        for name, dtype in CACHE_TYPES.items()
        for case in (*_HEADS, *_LATENTS)
    ),
)


def command(arguments: argparse.Namespace) -> int:
    need_cuda("attention")
    names = backend_names() if arguments.backends is None else arguments.backends.split(",")
    cases = [case for case in CASES if arguments.cases in case.name]
    show_rows("attention", tell(_run(torch.device("cuda"), names, cases)), arguments.output)
    return 0


def time_cuda(call: Callable[[], Any], repeat: int = 20) -> float:
    """Median seconds of a call, replayed from a CUDA graph where it can be recorded."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        run: Callable[[], Any] = graph.replay
    except RuntimeError:
        torch.cuda.synchronize()
        run = call
    times: list[float] = []
    for _ in range(repeat):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return median(times)


def read_bandwidth(device: torch.device) -> float:
    """Bytes per second of a sum over 2 GiB."""
    data = torch.zeros(2**29, dtype=torch.float32, device=device)
    return data.nbytes / time_cuda(lambda: data.sum())


def fill(pool: KVPool, layout: CacheLayout) -> None:
    """Write random rows to all pages of layer 0, some at a time, since there may be many."""
    for part in layout.parts:
        pages = len(pool.part(0, part.name))
        for first in range(0, pages, _FILLED):
            own = torch.arange(first, min(first + _FILLED, pages), device=pool.device)
            places = own.repeat_interleave(pool.page_size)
            offsets = torch.arange(pool.page_size, device=pool.device).repeat(len(own))
            rows = torch.randn(len(places), *part.shape, dtype=torch.bfloat16, device=pool.device)
            pool.write(0, places, offsets, rows, part.name)


def measure(case: Case, backend: str, device: torch.device) -> float | str:
    """Seconds of one layer's attention, or the reason why the backend cannot run it."""
    groups = group_layers([None], [case.layout])
    dtype = torch.bfloat16
    dims = case.num_heads, case.kv_heads, case.head_dim, case.head_dim**-0.5
    shape = AttentionShape(
        *dims,
        PAGE_SIZE,
        dtype,
        device,
        groups,
        case.seqs,
        longest=case.length,
        value_dim=case.latent,
    )
    reason = refusal(backend, shape)
    if reason is not None:
        return reason
    per_seq = -(-case.length // PAGE_SIZE)
    pages = case.seqs * per_seq
    pool = KVPool(groups, [pages], PAGE_SIZE, device)
    if case.dtype == FP8 and case.latent is None:
        pool.use_scales({0: (0.01, 0.01)})  # as a checkpoint may have them
    fill(pool, case.layout)
    order = 1 + np.random.default_rng(0).permutation(pages)
    table = order.reshape(case.seqs, per_seq).astype(np.int32)
    new = np.full(case.seqs, case.new_rows)
    total = np.full(case.seqs, case.length)
    batch = StepInputs.made_up(PAGE_SIZE, new, total, [table]).send(device, True).batch
    attention = dense_backend([dense_class(backend)], shape, pool)
    metadata = attention.prepare(batch)
    attention.begin(metadata)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, dtype=dtype, device=device)

    if case.latent is not None and case.new_rows > 1:
        width = _LATENT_HEAD
        heads = LatentHeads(
            draw(case.num_heads, width, case.latent), draw(case.num_heads, case.latent, width)
        )
        query = draw(int(new.sum()), case.num_heads, width + case.head_dim - case.latent)
        return time_cuda(lambda: attention.forward_latent(0, query, heads, metadata))
    query = draw(int(new.sum()), case.num_heads, case.head_dim)
    return time_cuda(lambda: attention.forward(0, query, metadata))


def _run(
    device: torch.device, backends: Sequence[str], cases: Sequence[Case]
) -> Iterator[dict[str, Any]]:
    bandwidth = read_bandwidth(device)
    for case, backend in itertools.product(cases, backends):
        if backend == "torch" and (case.new_rows > 1 or case.latent) and case.length > 8192:
            continue  # minutes
        row: dict[str, Any] = {"case": case.name, "backend": backend}
        seconds = measure(case, backend, device)
        if isinstance(seconds, str):
            row["skipped"] = seconds
        else:
            row["us"] = round(seconds * 1e6, 1)
            if case.new_rows > 1 or case.latent is not None:
                row["TFLOP/s"] = round(case.flops / seconds / 1e12, 1)
            if case.new_rows == 1:
                row["TB/s"] = round(case.kv_bytes / seconds / 1e12, 2)
                row["share_of_read"] = round(case.kv_bytes / seconds / bandwidth, 3)
        yield row
    yield {"case": "plain read of 2 GiB", "TB/s": round(bandwidth / 1e12, 2)}
