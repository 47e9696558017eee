"""Sparse attention of one query row per sequence, in three launches per layer.

    1. landmark scores of all candidate pages, attention in the window, and the landmark of the
       page that this row completes, if it does: nothing of this depends on anything else here
    2. the best k pages of every chunk of candidates
    3. of those the best k, attention inside them, and one merge: by the program that comes last

Where pages live in host memory, the third launch is cut in two, and what was selected is brought
in between them (see `swap_in`); unless all pages of a step are on the device, which its host knows.

Before the first layer `begin` notes which pages may be candidates. Programs share the work by
striding over pages, so that the cost follows the lengths that are there, also in a recorded graph.

    part:  a split (output, log-sum-exp) of the past; first the window's, then the pages'
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from cairn.kernels.interface import Located, Pooling
from cairn.kernels.landmark import POOLINGS
from cairn.kernels.pdl import pdl_options
from cairn.kernels.sizes import blocks_of, power_of_two
from cairn.kernels.sparse_pages import choose_kernel, pages_kernel, topk_kernel
from cairn.kernels.sparse_score import score_kernel
from cairn.kernels.sparse_scratch import CHUNK, ResidentFrames, SparseScratch, strips_of
from cairn.kernels.sparse_shape import STRATEGIES, SparseShape


def sparse_decode(
    shape: SparseShape,
    scratch: SparseScratch,  # after `begin`
    query: torch.Tensor,  # [rows, heads, dim]
    scoring: torch.Tensor,  # [rows, heads, landmark width], or half of it where they are split
    prior: torch.Tensor,  # [rows, heads, dim]
    pool: torch.Tensor,  # [pages, 2 * kv_heads, page_size, dim]
    vectors: torch.Tensor,  # [pages, landmark heads, landmark width]
    bias: torch.Tensor | None,  # [pages, landmark heads] float32
    page_table: torch.Tensor,  # [seqs, pages] int32
    kv_lens: torch.Tensor,  # [seqs] int32
    rows: torch.Tensor,  # [seqs] int32
    out: torch.Tensor,  # [rows, heads, dim], contiguous
    *,
    pooling: Pooling | None,  # None where the caller saves landmarks of completed pages
    kv_table: torch.Tensor | None = None,  # of the same stride, where pages live in host memory
    # Brings selected pages to the device. Its last kernel must not let the next one start before it
    # has itself waited for its predecessor. It counts the pieces of each page that have arrived;
    # attention waits until there are `pieces` of them.
    locate: Callable[[torch.Tensor], Located] | None = None,
    frames: ResidentFrames | None = None,  # or all of them are there, as `begin` was told
) -> None:
    seqs = len(kv_lens)
    group = shape.heads // shape.kv_heads
    shared = shape.heads // shape.landmark_heads
    strips, most_strips = strips_of(shape, seqs), scratch.score_lse.shape[2]
    pooled = 0 if pooling is None else shape.kv_heads
    sizes = {"HEADS": shape.heads, "KV_HEADS": shape.kv_heads}
    sizes |= {"PAGE_SIZE": shape.page_size, "WINDOW": shape.window}
    tasks = strips * shape.landmark_heads + shape.window_parts * shape.kv_heads + pooled
    half = query.dtype.itemsize == 2
    # Where a load is found by way of another one, half of the stages are for that.
    ahead = 5 if half and shape.head_dim * shape.page_size <= 8192 else 2
    score_kernel[(tasks, seqs)](
        query,
        scoring,
        prior,
        pool,
        vectors,
        vectors if bias is None else bias,
        page_table,
        page_table if kv_table is None else kv_table,
        kv_lens,
        rows,
        scratch.candidates,
        scratch.scores,
        scratch.score_lse,
        scratch.partial,
        scratch.partial_lse,
        shape.scale,
        query.stride(0),
        scoring.stride(0),
        prior.stride(0),
        page_table.stride(0),
        scratch.candidates.stride(0),
        strips,
        **sizes,
        DIM=shape.head_dim,
        LANDMARK_HEADS=shape.landmark_heads,
        WIDTH=shape.landmark_width,
        HIDE_LAST=shape.hide_last,
        HAS_BIAS=bias is not None,
        SPLIT=shape.split_query,
        POOLING=-1 if pooling is None else POOLINGS[pooling],
        MOST_STRIPS=most_strips,
        WINDOW_PARTS=shape.window_parts,
        PARTS=shape.parts,
        BLOCK_P=max(16, min(64, 8192 // shape.landmark_width)),
        BLOCK_G=shape.block_g,
        BLOCK_S=1 if shared == 1 else max(16, power_of_two(shared)),
        num_warps=4,
        num_stages=ahead if shared > 1 else 3 if half else 2,
        **pdl_options(query),
    )
    chunks = blocks_of(scratch.candidates.shape[1], CHUNK)
    block_k = power_of_two(shape.topk)
    best_stride = scratch.best_rank.stride(1)
    topk_kernel[(chunks, shape.kv_heads, seqs)](
        kv_lens,
        scratch.scores,
        scratch.score_lse,
        scratch.partial_lse,
        scratch.best_rank,
        scratch.best_index,
        scratch.candidates.stride(0),
        best_stride,
        strips,
        **sizes,
        SINKS=shape.sinks,
        STRATEGY=STRATEGIES[shape.strategy],
        TOPK=shape.topk,
        BLOCK_K=block_k,
        CHUNK=CHUNK,
        MOST_STRIPS=most_strips,
        WINDOW_PARTS=shape.window_parts,
        BLOCK_PARTS=power_of_two(shape.window_parts),
        PARTS=shape.parts,
        num_warps=4,
        **pdl_options(query),
    )
    best = power_of_two(chunks * shape.topk)
    located = Located(scratch.selected, scratch.selected, 0, 0)
    page_parts, stages = shape.page_parts, 2
    if locate is not None:
        choose_kernel[(shape.kv_heads, seqs)](
            kv_lens,
            scratch.best_rank,
            scratch.best_index,
            scratch.selected,
            best_stride,
            KV_HEADS=shape.kv_heads,
            PAGE_SIZE=shape.page_size,
            WINDOW=shape.window,
            TOPK=shape.topk,
            BLOCK_K=block_k,
            CHUNK=CHUNK,
            BEST=best,
            num_warps=1 if best <= 256 else 4,
            **pdl_options(query),
        )
        located = locate(scratch.selected[:seqs])
        page_parts = _parts_beside_copies(shape, seqs)
        stages = ahead
    table = page_table if frames is None else frames.table
    pages_kernel[(page_parts, shape.kv_heads, seqs)](
        query,
        pool,
        table,
        located.pages,
        located.arrived,
        kv_lens,
        rows,
        scratch.scores,
        scratch.best_rank,
        scratch.best_index,
        scratch.selected,
        scratch.partial,
        scratch.partial_lse,
        scratch.arrivals,
        scratch.launches,
        scratch.launches if frames is None else frames.reads,
        out,
        shape.scale,
        query.stride(0),
        table.stride(0),
        scratch.candidates.stride(0),
        best_stride,
        located.first_slot,
        located.arrived.shape[1],
        **sizes,
        DIM=shape.head_dim,
        HIDE_LAST=shape.hide_last,
        BY_LSE=shape.by_lse,
        NULL_SPLIT=shape.null_split,
        LOCATED=locate is not None,
        PIECES=located.pieces,
        COUNTED=frames is not None,
        TOPK=shape.topk,
        BLOCK_K=block_k,
        CHUNK=CHUNK,
        BEST=best,
        WINDOW_PARTS=shape.window_parts,
        PAGE_PARTS=page_parts,
        PARTS=shape.parts,
        BLOCK_G=shape.block_g,
        MERGE_G=power_of_two(group),
        num_warps=4,
        num_stages=stages,
        **pdl_options(query),
    )


def _parts_beside_copies(shape: SparseShape, seqs: int) -> int:
    """So many that all programs run at once, two on each processor of an H200: one that had to wait
    for its turn would begin when those before it have seen the last copy arrive."""
    parts = max(1, min(shape.page_parts, 264 // (seqs * shape.kv_heads)))
    return 1 << (parts.bit_length() - 1)  # few numbers: each is a compilation


def seq_rungs(shape: SparseShape, most: int) -> tuple[int, ...]:
    """Numbers of sequences, up to `most`, at which `sparse_decode` goes on to another compiled
    form. There is more than one only where pages are located."""
    parts = [_parts_beside_copies(shape, seqs) for seqs in range(most + 1) if seqs]
    return tuple(n for n, own in enumerate(parts, 1) if n == 1 or own != parts[n - 2])
