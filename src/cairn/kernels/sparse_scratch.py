"""Scratch memory of sparse decode steps, and the list of candidate pages that all layers share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from cairn.kernels.launch import direct
from cairn.kernels.sizes import blocks_of
from cairn.kernels.sparse_shape import SparseShape

CHUNK = 1024
"""Number of candidates from which one program chooses the best."""


@dataclass(frozen=True, slots=True)
class SparseScratch:
    """Memory that passes data between the launches of a layer; all layers share it."""

    candidates: torch.Tensor  # [seqs, pages] int32 page id, -1 if the page must not be read
    scores: torch.Tensor  # [seqs, heads, pages] float32
    score_lse: torch.Tensor  # [seqs, heads, strips] float32
    best_rank: torch.Tensor  # [seqs, kv_heads, chunks * topk] float32
    best_index: torch.Tensor  # [seqs, kv_heads, chunks * topk] int32, -1 for none
    best_page: torch.Tensor  # [seqs, kv_heads, chunks * topk] int32, unset where there is none
    selected: torch.Tensor  # [seqs, kv_heads, topk] int32 place in the sequence, -1 for none
    chosen: torch.Tensor  # [seqs, kv_heads, topk] int32 page, if a launch of its own chooses
    partial: torch.Tensor  # [seqs, parts, heads, dim] float32
    partial_lse: torch.Tensor  # [seqs, parts, heads] float32
    arrivals: torch.Tensor  # [seqs, kv_heads] int32
    launches: torch.Tensor  # [1] int64, number of layers attended, counted by the device

    @classmethod
    def empty(
        cls, shape: SparseShape, max_seqs: int, max_pages: int, device: torch.device
    ) -> SparseScratch:
        def floats(*size: int) -> torch.Tensor:
            return torch.empty(size, dtype=torch.float32, device=device)

        def ints(*size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        best = blocks_of(max_pages, CHUNK) * shape.topk
        return cls(
            ints(max_seqs, max_pages),
            floats(max_seqs, shape.heads, max_pages),
            floats(max_seqs, shape.heads, strips_of(shape, 1)),
            floats(max_seqs, shape.kv_heads, best),
            ints(max_seqs, shape.kv_heads, best),
            ints(max_seqs, shape.kv_heads, best),
            ints(max_seqs, shape.kv_heads, shape.topk),
            ints(max_seqs, shape.kv_heads, shape.topk),
            floats(max_seqs, shape.parts, shape.heads, shape.head_dim),
            floats(max_seqs, shape.parts, shape.heads),
            ints(max_seqs, shape.kv_heads),
            torch.zeros(1, dtype=torch.int64, device=device),
        )


@dataclass(frozen=True, slots=True)
class ResidentFrames:
    """Frames of pages that live in host memory, if all pages of a step are also on the device."""

    frame_of: torch.Tensor  # [page ids] int32, page of the pool that holds each
    table: torch.Tensor  # [seqs, pages] int32, the same by sequence; filled by `begin`
    reads: torch.Tensor  # [1] int64, number of pages read


def strips_of(shape: SparseShape, seqs: int) -> int:
    """Number of programs that share the candidates of one sequence and landmark head."""
    # Measured on an H200: two per multiprocessor are best for one sequence, four for more.
    programs = max(1, min(64, (264 if seqs == 1 else 528) // (seqs * shape.landmark_heads)))
    return 1 << (programs.bit_length() - 1)


@direct
@triton.jit(do_not_specialize=["table_stride", "seal"])
def _begin_kernel(
    page_table,  # [seqs, ...]
    generations,  # [seqs, ...]
    sealed,  # [pages] page generation that the landmark belongs to
    kv_lens,  # [seqs]
    candidates,
    frame_of,
    frames,  # [seqs, ...], written if IN_FRAMES
    table_stride: tl.int32,
    candidate_stride,
    frames_stride,
    seal: tl.int32,
    IN_FRAMES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    seq = tl.program_id(1)
    length = tl.load(kv_lens + seq).to(tl.int32)
    complete = length // PAGE_SIZE
    for start in range(tl.program_id(0) * BLOCK, complete, tl.num_programs(0) * BLOCK):
        index = start + tl.arange(0, BLOCK)
        there = index < complete
        page = tl.load(page_table + seq * table_stride + index, mask=there, other=0)
        generation = tl.load(generations + seq * table_stride + index, mask=there, other=0)
        own = tl.load(sealed + page, mask=there, other=-1)
        tl.store(
            candidates + seq * candidate_stride + index,
            tl.where(own == generation, page, -1),
            mask=there,
        )
        if IN_FRAMES:
            frame = tl.load(frame_of + page, mask=there, other=0)
            tl.store(frames + seq * frames_stride + index, frame, mask=there)
    if (seal > 0) & (tl.program_id(0) == 0) & (length % PAGE_SIZE == 0):
        last = seq * table_stride + complete - 1
        page = tl.load(page_table + last)
        # Rows that pad a batch are on page 0, which has no landmark.
        tl.store(sealed + page, tl.load(generations + last), mask=page > 0)


def begin(
    scratch: SparseScratch,
    page_table: torch.Tensor,  # [seqs, pages] int32
    generations: torch.Tensor,  # [seqs, pages] int32, same stride as page_table
    sealed: torch.Tensor,  # [pages] int32
    kv_lens: torch.Tensor,  # [seqs] int32
    *,
    page_size: int,
    seal: bool,  # every sequence adds one row; seal the pages that this completes
    frames: ResidentFrames | None = None,
) -> None:
    seqs = len(kv_lens)
    programs = 8 if seqs < 32 else 1
    table = scratch.candidates if frames is None else frames.table
    _begin_kernel[(programs, seqs)](
        page_table,
        generations,
        sealed,
        kv_lens,
        scratch.candidates,
        sealed if frames is None else frames.frame_of,
        table,
        page_table.stride(0),
        scratch.candidates.stride(0),
        table.stride(0),
        int(seal),
        IN_FRAMES=frames is not None,
        PAGE_SIZE=page_size,
        BLOCK=512,
        num_warps=4,
    )
