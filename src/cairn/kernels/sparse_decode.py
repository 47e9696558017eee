"""Sparse decode attention: one query row per sequence, three launches per layer.

    1. landmark scores of all candidate pages, attention over the window, and the landmark of the
       page that this row completes, if any; these do not depend on each other
    2. the best k pages of every chunk of candidates
    3. the best k of those, attention over them, and one merge by the last program to finish

If pages are small, the best k of all chunks are chosen by a launch of its own. They are, too, if
pages live in host memory: the selected pages are then brought in before attention (see `swap_in`),
unless the host knows that all pages of a step are on the device.

Before the first layer, `begin` records which pages may be candidates. Programs stride over pages,
so the cost follows the actual lengths, even in a recorded graph.

    part:  one split (output, log-sum-exp) of the past; window parts come first, then page parts
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
from cairn.kernels.sparse_shape import SparseShape


def sparse_decode(
    shape: SparseShape,
    scratch: SparseScratch,  # after `begin`
    query: torch.Tensor,  # [rows, heads, dim]
    scoring: torch.Tensor,  # [rows, heads, landmark width], or half that width if split_query
    prior: torch.Tensor,  # [rows, heads, dim]
    pool: torch.Tensor,  # [pages, 2 * kv_heads, page_size, dim]
    vectors: torch.Tensor,  # [pages, landmark heads, landmark width]
    bias: torch.Tensor | None,  # [pages, landmark heads] float32
    page_table: torch.Tensor,  # [seqs, pages] int32
    kv_lens: torch.Tensor,  # [seqs] int32
    rows: torch.Tensor,  # [seqs] int32
    out: torch.Tensor,  # [rows, heads, dim], contiguous
    *,
    pooling: Pooling | None,  # None if the caller saves the landmarks of completed pages
    kv_table: torch.Tensor | None = None,  # same stride; set if pages live in host memory
    # Brings selected pages to the device. Its last kernel must wait for its own predecessor before
    # it lets the next kernel start. It counts the pieces of each page that have arrived; attention
    # waits until `pieces` of them have.
    locate: Callable[[torch.Tensor], Located] | None = None,
    frames: ResidentFrames | None = None,  # set if all pages are resident; as in `begin`
) -> None:
    seqs = len(kv_lens)
    shared = shape.heads // shape.landmark_heads
    strips, most_strips = strips_of(shape, seqs), scratch.score_lse.shape[2]
    pooled = 0 if pooling is None else shape.kv_heads
    tasks = strips * shape.landmark_heads + shape.window_parts * shape.kv_heads + pooled
    half = query.dtype.itemsize == 2
    # Where the address of a load comes from another load, half of the stages go to the first one.
    ahead = 5 if half and shape.head_dim * shape.page_size <= 8192 else 2
    stages = ahead if shared > 1 else 3 if half else 2
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
        **shape.of(score_kernel),
        HAS_BIAS=bias is not None,
        POOLING=-1 if pooling is None else POOLINGS[pooling],
        MOST_STRIPS=most_strips,
        BLOCK_P=max(16, min(64, 8192 // shape.landmark_width)),
        WINDOW_STAGES=max(2, (stages + 1) // 2),
        num_warps=4,
        num_stages=stages,
        **pdl_options(query),
    )
    chunks = blocks_of(scratch.candidates.shape[1], CHUNK)
    best_stride = scratch.best_rank.stride(1)
    table = page_table if frames is None else frames.table
    topk_kernel[(chunks, shape.kv_heads, seqs)](
        kv_lens,
        table,
        scratch.scores,
        scratch.score_lse,
        scratch.partial_lse,
        scratch.best_rank,
        scratch.best_index,
        scratch.best_page,
        table.stride(0),
        scratch.candidates.stride(0),
        best_stride,
        strips,
        **shape.of(topk_kernel),
        CHUNK=CHUNK,
        MOST_STRIPS=most_strips,
        num_warps=4,
        **pdl_options(query),
    )
    best = power_of_two(chunks * shape.topk)
    located = Located(scratch.chosen, scratch.chosen, 0, 0)
    page_parts, stages = shape.page_parts, 2
    chosen = locate is not None or shape.tile_pages > 1
    if chosen:
        choose_kernel[(shape.kv_heads, seqs)](
            kv_lens,
            scratch.best_rank,
            scratch.best_index,
            scratch.best_page,
            scratch.selected,
            scratch.chosen,
            best_stride,
            **shape.of(choose_kernel),
            CHUNK=CHUNK,
            BEST=best,
            num_warps=1 if best <= 256 else 4,
            **pdl_options(query),
        )
    if locate is not None:
        located = locate(scratch.selected[:seqs])
        page_parts = _parts_beside_copies(shape, seqs)
        stages = ahead
    pages_kernel[(page_parts, shape.kv_heads, seqs)](
        query,
        pool,
        located.pages,
        located.arrived,
        kv_lens,
        rows,
        scratch.scores,
        scratch.best_rank,
        scratch.best_index,
        scratch.best_page,
        scratch.selected,
        scratch.partial,
        scratch.partial_lse,
        scratch.arrivals,
        scratch.launches,
        scratch.launches if frames is None else frames.reads,
        out,
        shape.scale,
        query.stride(0),
        scratch.candidates.stride(0),
        best_stride,
        located.first_slot,
        located.arrived.shape[1],
        **shape.of(pages_kernel),
        CHOSEN=chosen,
        LOCATED=locate is not None,
        PIECES=located.pieces,
        COUNTED=frames is not None,
        CHUNK=CHUNK,
        BEST=best,
        PAGE_PARTS=page_parts,
        num_warps=4,
        num_stages=stages,
        **pdl_options(query),
    )


def _parts_beside_copies(shape: SparseShape, seqs: int) -> int:
    """Number of page parts with which all programs run at once, two per multiprocessor of an H200.

    A program that had to wait for its turn would start only after earlier ones have seen the last
    copy arrive.
    """
    parts = max(1, min(shape.page_parts, 264 // (seqs * shape.kv_heads)))
    return 1 << (parts.bit_length() - 1)  # few values, because each is compiled separately


def seq_rungs(shape: SparseShape, most: int) -> tuple[int, ...]:
    """Sequence counts, up to `most`, at which `sparse_decode` switches to another compiled form.

    The form changes only if pages are located, that is, if `locate` is given.
    """
    parts = [_parts_beside_copies(shape, seqs) for seqs in range(most + 1) if seqs]
    return tuple(n for n, own in enumerate(parts, 1) if n == 1 or own != parts[n - 2])
