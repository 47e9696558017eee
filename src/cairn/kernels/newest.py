"""Tokens of a step's rows: those that the host knows, and those that an earlier step sampled."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cairn.kernels.launch import direct
from cairn.kernels.precompile import is_collecting
from cairn.kernels.sizes import blocks_of

_BLOCK = 256


@direct
@triton.jit(do_not_specialize=["rows"])
def _known_kernel(token_ids, sources, newest, out, rows: tl.int32, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = row < rows
    source = tl.load(sources + row, mask=there, other=-1)
    given = tl.load(token_ids + row, mask=there, other=0).to(tl.int64)
    sampled = tl.load(newest + source, mask=there & (source >= 0), other=0)
    tl.store(out + row, tl.where(source >= 0, sampled, given), mask=there)


def known_tokens(
    token_ids: torch.Tensor,  # [rows]
    sources: torch.Tensor,  # [rows] place in `newest`, -1 to use token_ids
    newest: torch.Tensor,  # [places] int64
) -> torch.Tensor:
    """-> token ids [rows] int64"""
    rows = len(token_ids)
    # While kernels are only collected, nothing writes `out`, and the embedding looks it up.
    make = torch.zeros if is_collecting() else torch.empty
    out = make(rows, dtype=torch.int64, device=token_ids.device)
    _known_kernel[(blocks_of(rows, _BLOCK),)](
        token_ids, sources, newest, out, rows, BLOCK=_BLOCK, num_warps=4
    )
    return out
