"""Synthetic selections of decode rows that change from token to token like a trained model's.

Random weights select different pages for every token, which no cache could serve. Here a row's
candidates are divided into k equal parts. The row reads one page of each part, and sometimes
changes it. One launch draws the pages of all layers, so a step takes hardly longer. A recorded step
draws new pages with every replay.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cairn.attention.hsa.kernel_sparse import DecodeRows, KernelMetadata, KernelSparse
from cairn.kernels.interface import Located
from cairn.kernels.launch import direct
from cairn.kernels.pdl import pdl_options
from cairn.kernels.sizes import power_of_two
from cairn.kernels.sparse_shape import SparseShape, candidate_limit


@dataclass(frozen=True, slots=True)
class DriftState:
    selected: torch.Tensor  # [layers, seqs, kv_heads, k] int32 place in the sequence, -1 for none
    clock: torch.Tensor  # [layers, seqs, kv_heads] int32

    @classmethod
    def empty(
        cls, shape: SparseShape, layers: int, max_seqs: int, device: torch.device
    ) -> DriftState:
        size = (layers, max_seqs, shape.kv_heads)
        return cls(
            torch.full((*size, shape.topk), -1, dtype=torch.int32, device=device),
            torch.zeros(size, dtype=torch.int32, device=device),
        )


@direct
@triton.jit
def _drift_kernel(
    kv_lens,
    selected,
    clock,
    change,
    max_seqs,
    KV_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    seq = tl.program_id(1)
    own = (tl.program_id(2) * max_seqs + seq) * KV_HEADS + tl.program_id(0)
    length = tl.load(kv_lens + seq).to(tl.int32)
    limit = candidate_limit(length - 1, WINDOW, PAGE_SIZE)
    now = tl.load(clock + own) + 1
    tl.store(clock + own, now)
    k = tl.arange(0, BLOCK_K)
    before = tl.load(selected + own * TOPK + k, mask=k < TOPK, other=-1)
    begin, end = k * limit // TOPK, (k + 1) * limit // TOPK
    drawn = begin + (tl.rand(2 * own + 1, now * BLOCK_K + k) * (end - begin)).to(tl.int32)
    # A page stays while new pages widen the parts. A page that is no longer in its part is dropped.
    moves = (tl.rand(2 * own, now * BLOCK_K + k) < change) | (before < begin) | (before >= end)
    place = tl.where(moves, tl.minimum(drawn, end - 1), before)
    # With fewer candidates than pages to select, all of them are selected.
    place = tl.where(limit >= TOPK, place, tl.where(k < limit, k, -1))
    tl.store(selected + own * TOPK + k, place, mask=k < TOPK)


def drift(
    shape: SparseShape,
    state: DriftState,
    kv_lens: torch.Tensor,  # [seqs] int32
    change: float,  # share of a row's pages that change from token to token
) -> None:
    layers, max_seqs = state.clock.shape[:2]
    _drift_kernel[(shape.kv_heads, len(kv_lens), layers)](
        kv_lens,
        state.selected,
        state.clock,
        change,
        max_seqs,
        KV_HEADS=shape.kv_heads,
        PAGE_SIZE=shape.page_size,
        WINDOW=shape.window,
        TOPK=shape.topk,
        BLOCK_K=power_of_two(shape.topk),
        num_warps=1,
        **pdl_options(kv_lens),
    )


class DriftingSparse(KernelSparse):
    """With a host tier, looks up drifting pages instead of those that decode rows selected.

    The attention weights stay those of the selected pages.
    """

    _drift: tuple[DriftState, float]

    def drift_by(self, change: float) -> None:
        """Start drifting; `change` is the share of a row's pages that change per token."""
        seqs, device = len(self._every_row), self._every_row.device
        layers = len(self._config.layers)
        self._drift = DriftState.empty(self._shape, layers, seqs, device), change

    def begin(self, metadata: KernelMetadata) -> None:
        super().begin(metadata)
        decode = metadata.decode
        if decode is not None and self._swap is not None and not decode.resident:
            state, change = self._drift
            drift(self._shape, state, decode.kv_lens, change)

    def _locate(self, layer: int, decode: DecodeRows, selected: torch.Tensor) -> Located:
        drawn = self._drift[0].selected[self._config.layers.index(layer), : len(selected)]
        return super()._locate(layer, decode, drawn)
