"""CUDA graphs of decode steps, one per batch size, recorded when the engine starts.

A recorded step reads its inputs from buffers of its own. Running it means overwriting them and
replaying; a batch between two recorded sizes is padded with rows that live on the null page. Where
pages live in host memory every size is recorded twice, with and without what brings pages in.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from cairn.attention.batch import to_device
from cairn.engine.inputs import DeviceDraws, HostDraws, HostInputs, StepInputs
from cairn.engine.rows import StepRows
from cairn.memory.pages import NULL_PAGE

Forward = Callable[[StepInputs, DeviceDraws], tuple[torch.Tensor, torch.Tensor]]
"""The device work of a step, after its inputs are there: logits [rows, vocab] and tokens [rows]."""


def batch_sizes(most: int) -> list[int]:
    """Sizes to record: dense where padding would cost most."""
    sizes = [size for size in (1, 2, 4, 8) if size < most]
    sizes += list(range(16, min(most, 128), 8)) + list(range(128, most, 16))
    return [*sizes, most]


def most_decode_rows(seqs: int, landmarks: bool) -> int:
    """Rows of the largest decode step that is recorded. A landmark row comes along now and then;
    that all of many sequences have one at once is rare, and done without a graph."""
    if not landmarks:
        return seqs
    return 2 * seqs if seqs <= 64 else seqs + seqs // 4


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    packed: torch.Tensor  # draws, then inputs
    tables: torch.Tensor  # [groups, size, max_pages] of what all share, generations behind pages
    logits: torch.Tensor  # [size, vocab]
    tokens: torch.Tensor  # [size]


class DecodeGraphs:
    def __init__(
        self,
        forward: Forward,
        *,
        sizes: Sequence[int],
        groups: int,
        page_size: int,
        max_pages: int,
        spare_slot: int,
        device: torch.device,
        generations: bool,
        tiered: bool = False,
    ) -> None:
        self._generations = generations
        self._kinds = (False, True) if tiered else (False,)  # all pages are on the device
        self._spare_slot = spare_slot
        self._forward = forward
        self._sizes = sorted(sizes)
        self._groups = groups
        self._page_size = page_size
        self._max_pages = max_pages
        self._device = device
        self._graphs: dict[tuple[int, bool], _Graph] = {}

    @property
    def largest(self) -> int:
        return self._sizes[-1]

    def record(self) -> None:
        """Largest first: the smaller ones then live in its memory."""
        pool = torch.cuda.graph_pool_handle()
        whole = self._padding(self.largest).pack_tables(self._generations)
        every = to_device(whole, self._device)
        for size, resident in itertools.product(reversed(self._sizes), self._kinds):
            host = replace(self._padding(size), resident=resident)
            draws = self._no_draws(size)
            packed = to_device(np.concatenate((draws.pack(), host.pack())), self._device)
            tables = every[:, :size]
            inputs = host.view(packed[4 * size :], tables, self._device)
            device_draws = DeviceDraws.view(packed[: 4 * size])
            stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(stream):
                self._forward(inputs, device_draws)  # compiles kernels and sets up libraries
            torch.cuda.current_stream(self._device).wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                logits, tokens = self._forward(inputs, device_draws)
            self._graphs[size, resident] = _Graph(graph, packed, tables, logits, tokens)

    def fits(self, rows: StepRows) -> bool:
        """One token per sequence, and not too many rows."""
        return len(rows.token_ids) <= self.largest and rows.only_decodes

    def run(self, host: HostInputs, draws: HostDraws | None) -> tuple[torch.Tensor, torch.Tensor]:
        """-> logits [seqs, vocab] and tokens [seqs], overwritten by the next run.

        Without draws the tokens mean nothing.
        """
        token_rows = host.rows.last_token_rows
        apart = host.apart()
        count = len(apart.rows.kv_lens)
        size = next(size for size in self._sizes if size >= count)
        graph = self._graphs[size, host.resident]
        padded = apart if size == count else self._pad(apart, size)
        own = self._no_draws(size)
        if draws is not None:
            own = draws.at(token_rows, size, self._spare_slot)
        graph.packed.copy_(to_device(np.concatenate((own.pack(), padded.pack())), self._device))
        width = padded.tables.shape[2]
        tables = padded.pack_tables(self._generations)
        graph.tables[:, :, :width].copy_(to_device(tables, self._device))
        graph.graph.replay()
        if len(token_rows) == count:
            return graph.logits[:count], graph.tokens[:count]
        wanted = to_device(token_rows, self._device)
        return graph.logits[wanted], graph.tokens[wanted]

    def _no_draws(self, count: int) -> HostDraws:
        """For rows whose token nobody wants."""
        return HostDraws(
            np.full(count, self._spare_slot),
            np.zeros(count, dtype=np.int64),
            np.zeros(count, dtype=np.float32),
        )

    def _padding(self, size: int, width: int | None = None) -> HostInputs:
        """Rows of sequences of length one, all on the null page."""
        ones = np.ones(size, dtype=np.int64)
        zeros = np.zeros(size, dtype=np.int64)
        rows = StepRows(
            token_ids=zeros,
            sources=-ones,
            positions=zeros,
            lengths=ones,
            cache_rows=zeros,
            seq=np.arange(size),
            query_lens=ones,
            kv_lens=ones,
            cu_query=np.arange(size + 1),
            is_token=ones.astype(bool),
            last_token_rows=np.arange(size),
        )
        shape = (self._groups, size, width or self._max_pages)
        tables = np.full(shape, NULL_PAGE, dtype=np.int32)
        none = np.zeros(0, dtype=np.int64)
        return HostInputs(rows, self._page_size, tables, np.zeros_like(tables), zeros, none)

    def _pad(self, host: HostInputs, size: int) -> HostInputs:
        count = len(host.rows.kv_lens)
        rest = self._padding(size - count, host.tables.shape[2])
        joined = {
            name: np.concatenate((getattr(host.rows, name), getattr(rest.rows, name)))
            for name in (
                "token_ids",
                "sources",
                "positions",
                "lengths",
                "cache_rows",
                "query_lens",
                "kv_lens",
                "is_token",
            )
        }
        rows = StepRows(
            **joined,
            seq=np.arange(size),
            cu_query=np.arange(size + 1),
            last_token_rows=np.arange(size),
        )
        return HostInputs(
            rows,
            self._page_size,
            np.concatenate((host.tables, rest.tables), 1),
            np.concatenate((host.generations, rest.generations), 1),
            np.concatenate((host.prompt_rows, rest.prompt_rows)),
            host.traced_rows,
        )
