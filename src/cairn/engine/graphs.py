"""CUDA graphs of whole steps, recorded when the engine starts.

Each recorded step reads its inputs from its own buffers. To run it, the engine overwrites these
buffers and replays the graph. A step between two recorded sizes is padded with rows that are
written to the null page.

    decode graphs:  one row per sequence, by number of rows
    few rows:       as many rows per sequence as a check of drafts has, by number of sequences
    mixed graphs:   any number of rows per sequence, by number of rows and of sequences

They are recorded once for each kind of step that the attention backend distinguishes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from cairn.attention.backend import Graph
from cairn.attention.batch import send, to_device
from cairn.engine.drafting import Unseen
from cairn.engine.inputs import Draws, StepInputs
from cairn.engine.step_time import step_sizes
from cairn.kernels.interface import RowInputs
from cairn.kernels.packing import pack, unpack
from cairn.memory.geometry import PageGeometry

Forward = Callable[
    [StepInputs, Draws[torch.Tensor], torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]
]
"""The device work of a step whose inputs are on the device. Arguments: the inputs, how tokens are
drawn, and the rows [samples] whose logits are needed (None for all rows). Returns logits [samples,
vocab] and tokens [samples]."""

Call = Callable[[], tuple[torch.Tensor, torch.Tensor]]

_MIXED_TOKENS = (
    *(16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 640, 768, 896, 1024),
    *(1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192),
)
_FEW_SEQS = 8
"""Mixed steps are recorded at all sizes for up to this many sequences, and at fewer sizes for the
largest number of sequences."""


def batch_sizes(most: int) -> list[int]:
    """Decode step sizes to record, in rows. Small sizes are close together, since padding costs
    most there."""
    sizes = [size for size in (1, 2, 4, 8) if size < most]
    sizes += list(range(16, min(most, 128), 8)) + list(range(128, most, 16))
    return [*sizes, most]


def coarse_sizes(most: int) -> list[int]:
    """Sizes for a rare kind of decode step: powers of two, and `most`."""
    return [*(1 << i for i in range(most.bit_length()) if 1 << i < most), most]


def most_decode_rows(seqs: int, landmarks: bool) -> int:
    """Rows of the largest decode step to record.

    A sequence adds a landmark row with each completed page. With many sequences it is rare that
    most of them do so in the same step; such steps run without a graph.
    """
    if not landmarks:
        return seqs
    return 2 * seqs if seqs <= 64 else seqs + seqs // 4


class StepSize(NamedTuple):
    rows: int
    seqs: int
    """In a mixed step one of them is for padding."""


def mixed_sizes(most_rows: int, most_seqs: int, geometry: PageGeometry) -> list[StepSize]:
    """Sizes of mixed steps to record: some numbers of tokens with their landmark rows, and
    `most_rows`."""

    def rows(tokens: Iterable[int]) -> list[int]:
        return [*(own for own in map(geometry.rows, tokens) if own < most_rows), most_rows]

    few = min(_FEW_SEQS, most_seqs)
    sizes = [StepSize(own, few + 1) for own in rows(_MIXED_TOKENS)]
    if most_seqs > few:
        coarse = (own for own in _MIXED_TOKENS if own & (own - 1) == 0 and own >= 64)
        sizes += [StepSize(own, most_seqs + 1) for own in rows(coarse)]
    return sizes


def recorded_sizes(
    graphs: Collection[Graph],
    geometry: PageGeometry,
    *,
    decode_rows: int,
    mixed_rows: int,
    seqs: int,
    few_rows: Collection[int] = (),
    selecting_rows: int | None = None,
) -> dict[Graph, list[StepSize]]:
    """Sizes to record for each kind of step, up to these numbers of rows and sequences; none of
    mixed steps if `mixed_rows` is 0. A sequence with few rows has one of `few_rows`, or fewer.
    Mixed steps that are not dense have up to `selecting_rows` rows, if that is a number."""
    sizes = {}
    for graph in graphs:
        if graph.mixed:
            most = mixed_rows
            if graph.kind != "dense" and selecting_rows is not None:
                most = min(most, selecting_rows)
            sizes[graph] = mixed_sizes(most, seqs, geometry) if most else []
        elif graph.few:
            sizes[graph] = [
                StepSize(rows * count, count)
                for count in {*step_sizes(seqs, 1), seqs}
                for rows in few_rows
            ]
        else:
            own = coarse_sizes(decode_rows) if graph.kind == "both" else batch_sizes(decode_rows)
            sizes[graph] = [StepSize(rows, rows) for rows in own]
    return sizes


@dataclass(frozen=True, slots=True)
class _Recorded:
    graph: torch.cuda.CUDAGraph
    packed: torch.Tensor  # draws, rows whose logits are needed, inputs
    tables: torch.Tensor  # [groups, seqs, max_pages] view of the shared tables; pages, generations
    logits: torch.Tensor  # [samples, vocab]
    tokens: torch.Tensor  # [samples]


class StepGraphs:
    def __init__(
        self,
        forward: Forward,
        *,
        sizes: Mapping[Graph, Sequence[StepSize]],
        page_size: int,
        tables: tuple[int, int, int],
        device: torch.device,
        generations: bool,
        spare: int,
        samples: int = 1,
    ) -> None:
        """`tables` is the shape [groups, slots, pages] of the page tables of all requests. `spare`
        is where tokens that nobody needs are stored. `samples` is the most tokens that a sequence
        of a mixed step samples."""
        self._page_size = page_size
        self._num_groups, _, self._max_pages = tables
        self._spare = spare
        self._generations = generations
        self._per_seq = samples
        self._sizes = {graph: sorted(own) for graph, own in sizes.items()}
        every = [(graph, size) for graph, own in sizes.items() for size in own]
        self._most_seqs = max(size.seqs for _, size in every)
        self._most_samples = max(self._samples(*each) for each in every)
        self._forward = forward
        self._device = device
        self._graphs: dict[tuple[Graph, StepSize], _Recorded] = {}
        self._shared: torch.Tensor | None = None  # [samples, vocab]
        self._stream: torch.cuda.Stream | None = None  # of all captures
        self._pool: Any = None  # of the allocator, for all graphs
        self._sent_tables: np.ndarray | None = None  # those of the run before

    def rehearse(self, rows: Sequence[int], seqs: Sequence[int]) -> None:
        """Run, without a graph, the smallest step to record that has room for each of these
        numbers of rows and of sequences."""
        tables = self._all_tables()
        for graph, sizes in self._sizes.items():
            some = {next((size for size in sizes if size.rows >= count), None) for count in rows}
            some |= {next((size for size in sizes if size.seqs >= count), None) for count in seqs}
            for size in some:
                if size is not None:
                    self._step(graph, size, tables)[0]()

    def record(self, reserve: int = 0) -> None:
        """Record all steps, except sizes that would leave less than `reserve` bytes of the device
        free. Steps of these sizes run without a graph."""
        # The collector may free a graph of another engine; CUDA forbids that during a capture.
        gc.collect()
        collecting = gc.isenabled()
        gc.disable()
        try:
            self._record(reserve)
        finally:
            if collecting:
                gc.enable()

    def _record(self, reserve: int) -> None:
        if self._device.type == "cuda":
            self._pool = torch.cuda.graph_pool_handle()
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
        every = self._all_tables()
        run = set()
        # Largest first, so that smaller graphs reuse its memory.
        steps = [(size, graph) for graph, sizes in self._sizes.items() for size in sizes]
        for size, graph in sorted(steps, reverse=True):
            call, packed, tables = self._step(graph, size, every)
            if graph not in run:  # the first run of each kind sets up libraries
                if not self._fits(call, reserve):
                    self._sizes[graph].remove(size)
                    continue
                run.add(graph)
            if graph.mixed or graph.few or graph.kind == "both":
                # There are many of these graphs, so their logits share one buffer.
                call = partial(self._into_shared, call)
            captured, (logits, tokens) = self._capture(call)
            self._graphs[graph, size] = _Recorded(captured, packed, tables, logits, tokens)

    def _fits(self, call: Call, reserve: int) -> bool:
        """Run a step without a graph. Returns whether the device has room for its tensors beside
        `reserve` bytes."""
        if self._device.type != "cuda":
            call()
            return True
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        try:
            with self._aside():
                call()
            torch.cuda.synchronize(self._device)
        except torch.OutOfMemoryError:
            return False
        finally:
            torch.cuda.empty_cache()
        needed = torch.cuda.max_memory_allocated(self._device) - before
        # Graphs before this one hold memory that it will reuse.
        held, free = self.memory_bytes(), torch.cuda.mem_get_info(self._device)[0]
        return needed + reserve <= free + held

    def memory_bytes(self) -> int:
        """Bytes of the device that recorded steps hold for their tensors."""
        if self._pool is None:
            return 0
        segments = torch.cuda.memory_snapshot(self._pool)  # type: ignore[no-untyped-call]
        return sum(segment["total_size"] for segment in segments)

    def _into_shared(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        logits, tokens = call()
        if self._shared is None:
            self._shared = logits.new_empty(self._most_samples, logits.shape[1])
        return self._shared[: len(logits)].copy_(logits), tokens

    def _all_tables(self) -> torch.Tensor:
        """Tables [groups, seqs, pages] for the most sequences; all graphs share them."""
        groups = self._num_groups * (2 if self._generations else 1)
        size = (groups, self._most_seqs, self._max_pages)
        return torch.zeros(size, dtype=torch.int32, device=self._device)

    def _step(
        self, graph: Graph, size: StepSize, every_table: torch.Tensor
    ) -> tuple[Call, torch.Tensor, torch.Tensor]:
        """The call to record, and the buffers that it reads its inputs and tables from."""
        lens = np.ones(size.seqs, dtype=np.int64)
        if graph.mixed:
            lens[0], lens[1:] = size.rows, 0
        elif graph.few:
            lens[:] = size.rows // size.seqs
        no_pages = np.zeros((self._num_groups, size.seqs, self._max_pages))
        host = StepInputs.made_up(
            self._page_size,
            lens,
            lens,
            list(no_pages),
            resident=graph.kind == "resident",
            generation=0,
        )
        host = replace(host, batch=replace(host.batch, recorded=graph.kind, few=graph.few))
        samples = self._samples(graph, size)
        draws = Draws.none(samples, self._spare)
        none = np.zeros(samples, dtype=np.int64)
        arrays = (*draws.arrays(), none, *host.arrays())
        packed = to_device(pack(arrays), self._device)
        tables = every_table[:, : size.seqs]
        seeds, temperatures, places, wanted, *rest = unpack(packed, [len(own) for own in arrays])
        device_draws = Draws.on_device((seeds, temperatures, places))
        inputs = host.on_device(rest, tables)
        logit_rows = wanted if graph.mixed else None
        return partial(self._forward, inputs, device_draws, logit_rows), packed, tables

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Run the body on a separate stream, as CUDA requires for recording.

        All captures share it: the allocator reuses a block only on the stream that it was made
        for, so with a stream for each capture no graph would reuse the memory of another.
        """
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        current, stream = torch.cuda.current_stream(self._device), self._stream
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            yield
        current.wait_stream(stream)

    def _capture(
        self, call: Call
    ) -> tuple[torch.cuda.CUDAGraph, tuple[torch.Tensor, torch.Tensor]]:
        """A graph of what the call launches, and the call's result, which replays overwrite."""
        graph = torch.cuda.CUDAGraph()
        # `torch.cuda.graph` would empty the allocator's cache every time.
        with self._aside():
            graph.capture_begin(self._pool)
            try:
                result = call()
            finally:
                graph.capture_end()
        return graph, result

    def _samples(self, graph: Graph, size: StepSize) -> int:
        """Number of rows whose logits a recorded step computes: in a decode step of every row."""
        return min(size.rows, size.seqs * self._per_seq) if graph.mixed else size.rows

    def size_for(self, graph: Graph, host: StepInputs) -> StepSize | None:
        """The smallest recorded size that fits a step; None if none does.

        Each row of a decode step counts as a sequence, so that landmark rows and drafts fit too,
        unless the graph is for few rows.
        """
        batch = host.batch
        num_rows, samples = batch.num_rows, len(host.sampled_rows)
        num_seqs = batch.num_seqs + 1 if graph.mixed else num_rows
        if graph.few:
            num_seqs = batch.num_seqs
            if batch.query_lens.max() > self._per_seq:
                return None
        for size in self._sizes.get(graph, ()):
            fits = num_rows <= size.rows and num_seqs <= size.seqs
            if fits and samples <= self._samples(graph, size):
                return size
        return None

    def run(
        self,
        host: StepInputs,
        graph: Graph,
        size: StepSize,
        draws: Draws[np.ndarray] | None,
        *,
        new_tables: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Replay a step, for a decode graph of single rows one whose rows are sequences. Returns
        its logits [samples, vocab] and tokens [samples].

        The next run overwrites both. Without `draws` the tokens are meaningless. If `new_tables` is
        False, the first tables are those of the run before.
        """
        places = self.load(host, graph, size, draws, new_tables=new_tables)
        recorded = self._graphs[graph, size]
        recorded.graph.replay()
        count = len(places)
        if np.array_equal(places, np.arange(count)):
            return recorded.logits[:count], recorded.tokens[:count]
        index = to_device(places, self._device)
        return recorded.logits[index], recorded.tokens[index]

    def load(
        self,
        host: StepInputs,
        graph: Graph,
        size: StepSize,
        draws: Draws[np.ndarray] | None,
        *,
        new_tables: bool = True,
    ) -> np.ndarray:
        """Overwrite the inputs of a recorded step. Returns the places of its samples among those of
        the graph."""
        wanted = host.sampled_rows
        recorded = self._graphs[graph, size]
        # A decode step has the logits of every row.
        places = np.arange(len(wanted)) if graph.mixed else wanted
        samples = self._samples(graph, size)
        own = Draws.none(samples, self._spare)
        if draws is not None:
            own.places[places] = draws.places
            own.seeds[places] = draws.seeds
            own.temperatures[places] = draws.temperatures
        logit_rows = np.zeros(samples, dtype=np.int64)
        logit_rows[places] = wanted
        arrays = host.padded_arrays(*size, mixed=graph.mixed)
        send(pack((*own.arrays(), logit_rows, *arrays)), recorded.packed)
        if new_tables:
            tables = host.pack_tables(self._generations, size.seqs)
            if self._sent_tables is None or not np.array_equal(tables, self._sent_tables):
                recorded.tables[:, :, : tables.shape[2]].copy_(to_device(tables, self._device))
                self._sent_tables = tables
        return places

    def draft(
        self,
        host: StepInputs,
        steps: Sequence[tuple[Graph, StepSize]],
        draws: Draws[np.ndarray],
        unseen: Unseen,
    ) -> None:
        """Replay steps that draft one token after the other. `host` and `draws` are those of the
        first, as if no earlier draft had come true."""
        loaded = None
        for later, step in enumerate(steps):
            anew = step != loaded
            if anew:
                self.load(host, *step, draws, new_tables=loaded is None)
                rows, loaded = self._row_inputs(*step), step
            unseen.move(rows, later if anew else 1, self._page_size, by_right=anew)
            self._graphs[step].graph.replay()

    def _row_inputs(self, graph: Graph, size: StepSize) -> RowInputs:
        """The inputs of a recorded step of single rows, to be changed on the device."""
        rows, groups = size.rows, self._num_groups
        recorded = self._graphs[graph, size]
        lengths = [2 * rows, *[rows] * (8 + groups), rows]
        seeds, _, places, _, _, sources, positions, lens, offsets, *rest = unpack(
            recorded.packed, lengths
        )
        return RowInputs(
            *(seeds.view(torch.int64), places, sources, positions, lens, offsets),
            *(tuple(rest[:groups]), rest[groups], recorded.tables),
        )
