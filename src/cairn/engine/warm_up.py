"""Synthetic steps of every kind, run before the engine is ready.

Kernels are compiled for constants that depend on the size of a step. Each kernel reports the sizes
at which its constants change, and there is a step here for each such size. First all steps run
without launching anything, which collects the kernels they need. These are compiled in parallel.
Then some of the steps run for real, which sets up libraries.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from cairn.attention.backend import AttentionBackend, Graph, SparseBackend
from cairn.attention.batch import to_device
from cairn.attention.widened import overflowing_seqs
from cairn.engine.drafting import Unseen
from cairn.engine.inputs import StepInputs
from cairn.engine.memory_plan import MemoryPlan
from cairn.engine.resolve import EngineChoices
from cairn.engine.step_time import step_sizes
from cairn.engine.stepper import Stepper
from cairn.kernels.packing import table_width
from cairn.memory.hisparse import HiSparseCoordinator
from cairn.models import experts, layers
from cairn.models.decoder import CUT_ROWS
from cairn.models.interface import LanguageModel
from cairn.models.loader import Progress

_CHUNK = 40  # rows of a chunk in steps where only the past matters
_MOST_RECORDED_TOKENS = 8192
"""Tokens of the largest mixed step that is recorded. With more the device takes longer than the
host needs to launch the kernels, so a graph saves nothing."""


@torch.inference_mode()
def warm_up(
    stepper: Stepper,
    choices: EngineChoices,
    memory: MemoryPlan,
    tier: HiSparseCoordinator | None,
    *,
    records: bool,
    progress: Progress | None = None,
) -> dict[str, float]:
    """Compile all kernels that a step may launch, set up libraries, and record graphs if `records`.
    Returns how many seconds each part took."""
    from cairn.kernels.precompile import collecting, compile_all

    def rehearse_drafts() -> None:
        if choices.sparse_drafts:
            Unseen.rehearse(stepper.newest, len(choices.groups), geometry.page_size)

    begin = time.perf_counter()
    geometry, sparse, backend = choices.geometry, choices.sparse, stepper.backend
    chunk, max_seqs = memory.limits.chunked_prefill_size, memory.limits.max_running_requests
    max_pages, tiered = memory.max_pages, tier is not None
    if memory.limits.max_step_seconds is not None:
        layers.warm_up_products(stepper.model, step_sizes(chunk))
    dense_below = 0 if sparse is None else sparse.dense_below
    own = None if stepper.sparse is None else stepper.sparse.rungs(max_seqs, max_pages)
    if own is None and not backend.graphs:
        # Attention does not use Cairn's own kernels. What other libraries launch depends only on
        # the number of rows, so a few sequences and pages are enough.
        max_seqs, max_pages = 2, min(max_pages, geometry.pages(chunk))
        dense_below = 0
    rungs = rungs_of(stepper.model, backend, max_seqs, max_pages)
    longest = max_pages * geometry.page_size
    steps = list(
        rehearsals(
            rungs,
            page_size=geometry.page_size,
            max_pages=max_pages,
            chunk=chunk,
            dense_below=dense_below,
            overflowing=overflowing_seqs(choices.dense, choices.dense_shape, longest),
        )
    )
    most_recorded = min(geometry.rows(_MOST_RECORDED_TOKENS), chunk)
    with collecting() as forms, _excerpt(stepper, choices, tiered=tiered):
        for step in steps:
            step.run(stepper, choices, tiered=tiered)
        rehearse_head(stepper.model)
        if tier is not None:
            tier.rehearse()
        if records:
            stepper.make_graphs(most_recorded).rehearse(rungs.rows, rungs.seqs)
            rehearse_drafts()
    moments = [begin, time.perf_counter()]
    compile_all(forms, progress)
    moments.append(time.perf_counter())
    with _Peak(stepper.device) as activations:
        for step in steps:
            if step.for_real:
                step.run(stepper, choices, tiered=tiered)
    moments.append(time.perf_counter())
    if records:
        stepper.record_graphs(most_recorded, activations.bytes)
        rehearse_drafts()
    moments.append(time.perf_counter())
    stepper.activation_bytes = activations.bytes
    parts = ("list kernels", f"load or compile {len(forms)} kernels", "run steps", "record graphs")
    return dict(zip(parts, np.diff(moments).tolist(), strict=True))


class _Peak:
    """Inside, measures the most bytes that tensors take on the device at once."""

    def __init__(self, device: torch.device) -> None:
        self._device, self.bytes = device, 0

    def __enter__(self) -> _Peak:
        if self._device.type == "cuda":
            self._before = torch.cuda.memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        return self

    def __exit__(self, *_: object) -> None:
        if self._device.type == "cuda":
            self.bytes = torch.cuda.max_memory_allocated(self._device) - self._before


@contextmanager
def _excerpt(stepper: Stepper, choices: EngineChoices, *, tiered: bool) -> Iterator[None]:
    """Inside, the model runs only one layer of those that use the same kernels."""
    whole, group_of = stepper.model, stepper.pool.group_of
    sparse_layers = () if choices.sparse is None else choices.sparse.layers
    if not tiered:  # a tier prefetches pages layer by layer, so all layers must run
        stepper.model = whole.excerpt(lambda layer: (group_of[layer], layer in sparse_layers))
    try:
        yield
    finally:
        stepper.model = whole


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """A synthetic step."""

    new: Sequence[int]
    """New rows of each sequence."""
    past: Sequence[int]
    """Rows of each sequence that are already in the cache."""
    prompt: bool
    """The rows belong to a prompt; otherwise they are generated."""
    scored: int = 0
    """Rows that pass the last layer, the last ones of the step; by default those that are sampled.
    The last layer computes no other rows in long steps."""
    for_real: bool = False
    """Also run it with kernels launched."""

    def inputs(self, groups: int, page_size: int, *, resident: bool) -> StepInputs:
        """The step's inputs; all pages are the null page."""
        total = np.add(self.new, self.past)
        tables = np.zeros((groups, len(total), table_width(-(-int(total.max()) // page_size))))
        return StepInputs.made_up(
            page_size,
            self.new,
            total,
            list(tables),
            prompt_rows=total if self.prompt else np.zeros_like(total),
            resident=resident,
            generation=0,  # that of the null page, so that it can be selected
        )

    def run(self, stepper: Stepper, choices: EngineChoices, *, tiered: bool) -> None:
        """Run the step; with a host tier once more, as if all pages were on the device."""
        from cairn.kernels.sampling import sample

        device, backend, sparse = stepper.device, stepper.backend, stepper.sparse
        groups, page_size = len(choices.groups), choices.geometry.page_size
        for resident in (False, True) if tiered else (False,):
            host = self.inputs(groups, page_size, resident=resident)
            inputs = host.send(device, stepper.reads_generations)
            rows = host.sampled_rows
            if self.scored:
                rows = np.arange(host.batch.num_rows - self.scored, host.batch.num_rows)
            wanted = to_device(rows, device)
            logits = stepper.forward(inputs, backend.prepare(inputs.batch), wanted)
            temperatures = torch.zeros(len(wanted), device=device)
            seeds = torch.zeros(len(wanted), dtype=torch.int64, device=device)
            # The forms that `sample` gets: logits as computed, contiguous after rows were picked,
            # float32 after penalties.
            for some in (logits, logits.contiguous(), logits.float()):
                sample(some, temperatures, seeds)
            graph = Graph("dense", mixed=False)
            if sparse is not None and graph in sparse.graphs:
                sparse.replayed(inputs.batch, graph)


@dataclass(frozen=True, slots=True)
class Rungs:
    """Step sizes at which kernels switch to another compiled form."""

    rows: Sequence[int]
    seqs: Sequence[int]
    pages: Sequence[int]
    """Pages of the longest sequence."""


def rungs_of(
    model: LanguageModel, backend: AttentionBackend, max_seqs: int, max_pages: int
) -> Rungs:
    """The rungs of all kernels, including the backend's own."""
    from cairn.kernels import code_rows, few_rows, fp8, gemv, packed, paged_decode, rope_kv

    rows = {*gemv.row_rungs(), *rope_kv.row_rungs(), *experts.row_rungs(model)}
    rows |= {*fp8.row_rungs(), *packed.row_rungs(), *layers.row_rungs()}
    rows |= {*few_rows.row_rungs(), *code_rows.row_rungs()}
    seqs, pages = {*paged_decode.seq_rungs(), max_seqs}, {1, max_pages}
    own = backend.rungs(max_seqs, max_pages) if isinstance(backend, SparseBackend) else None
    if own is not None:
        seqs.update(own[0])
        pages.update(own[1])
    return Rungs(
        sorted(rows),
        sorted(count for count in seqs if count <= max_seqs),
        sorted(count for count in pages if count <= max_pages),
    )


def rehearse_head(model: LanguageModel) -> None:
    """The output head multiplies only rows that are sampled or scored, any number of them."""
    from cairn.kernels import code_rows, few_rows, fp8, packed

    rungs = {*few_rows.row_rungs(), *code_rows.row_rungs()}
    rungs |= {*fp8.row_rungs(), *packed.row_rungs()}
    model.rehearse_head(sorted(rungs))


def rehearsals(
    rungs: Rungs,
    *,
    page_size: int,
    max_pages: int,
    chunk: int,
    dense_below: int,
    overflowing: int,
) -> Iterator[Rehearsal]:
    """The steps to rehearse. Generated rows at position `dense_below` or later are not dense.
    `overflowing` of the longest sequences are too many for widened pages; 0 if there are none."""
    longest = max_pages * page_size
    # The position of a row that is not dense and completes a page.
    beyond = min(longest - 1, -(-dense_below // page_size) * page_size + page_size - 1)
    some = min(_CHUNK, longest)
    for pages in rungs.pages:
        past = max(0, min((pages - 1) * page_size, longest - some))
        yield Rehearsal([some], [past], prompt=True)
        yield Rehearsal([some], [past], prompt=False)
    for count, past in itertools.product(rungs.seqs, sorted({0, beyond})):
        yield Rehearsal([1] * count, [past] * count, prompt=False)
        if count > 1:
            for prompt in (False, True):
                new = [1] * (count - 1) + [some]
                yield Rehearsal(new, [min(past, longest - some)] * count, prompt=prompt)
    for count in rungs.rows:
        if 1 < count <= min(longest, max(chunk, *rungs.seqs)):
            yield Rehearsal([count], [0], prompt=True)
            # Prompts with log-probabilities: all rows, and a part of them.
            yield Rehearsal([count], [0], prompt=True, scored=count)
            if (rows := max(CUT_ROWS, 4 * count)) <= min(longest, chunk):
                yield Rehearsal([rows], [0], prompt=True, scored=count)
    if 0 < overflowing <= max(rungs.seqs):
        yield Rehearsal([2] * overflowing, [longest - 2] * overflowing, prompt=True)
    most = min(chunk, longest)
    yield Rehearsal([most], [longest - most], prompt=True)
    for rows in {min(rows, most) for rows in (1024, 2048, 4096, chunk)}:
        yield Rehearsal([rows], [0], prompt=True, for_real=True)
        yield Rehearsal([rows], [min(longest - rows, beyond)], prompt=False, for_real=True)
