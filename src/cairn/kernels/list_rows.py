"""Lists all rows of a step for `index_scan`: the sequence of each row, how many rows it sees, and
items. Lengths are read on the device, so steps can be recorded.

Rows are split into tiles. The items of a tile are those of `cut_items`, and behind them empty ones,
as many as there is room for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from cairn.kernels.interface import LISTED_ROWS
from cairn.kernels.launch import direct
from cairn.kernels.sizes import blocks_of

_WORDS = 4  # int32 values in 16 bytes; pointers to the parts of a tile are aligned to that


@dataclass(frozen=True, slots=True)
class ListedRows:
    """All rows of a step in tiles of `at_once` rows; `list_rows` fills the tensors."""

    seqs: torch.Tensor  # [rows + 1] int32; `index_scan` looks up an empty item at the end
    limits: torch.Tensor  # [rows] int32, rows that each sees
    items: torch.Tensor  # [tiles, most_items + 1 or more] int32, first row of each in its tile
    plans: torch.Tensor  # [tiles, most_items + 2 or more] int32, see `index_scan`
    at_once: int
    per_item: int
    most_items: int

    @classmethod
    def empty(
        cls, rows: int, seqs: int, at_once: int, per_item: int, device: torch.device
    ) -> ListedRows:
        """For a step of so many rows of at most `seqs` sequences."""
        at_once = min(rows, at_once)
        most_items = min(at_once, blocks_of(at_once, per_item) + seqs)
        size = blocks_of(rows, at_once), blocks_of(most_items + 2, _WORDS) * _WORDS

        def ints(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        own = ints(rows + 1), ints(rows), ints(*size), ints(*size)
        return cls(*own, at_once, per_item, most_items)


@direct
@triton.jit(
    do_not_specialize=["num_rows", "num_seqs", "halvings", "at_once", "most_items", "item_stride"]
)
def _list_kernel(
    cu_query,  # [num_seqs + 1]
    kv_lens,  # [num_seqs]
    seqs,
    limits,
    items,
    num_rows: tl.int32,
    num_seqs: tl.int32,
    halvings: tl.int32,  # at least log2(num_seqs)
    at_once: tl.int32,
    most_items: tl.int32,
    item_stride: tl.int32,
    PER_ITEM: tl.constexpr,
    BLOCK: tl.constexpr,  # at least at_once
):
    begin = tl.program_id(0) * at_once
    count = tl.minimum(at_once, num_rows - begin)
    place = tl.arange(0, BLOCK)
    there = place < count
    row = begin + place
    # The last sequence that begins at a row or before it. Those behind it are empty.
    seq = tl.zeros((BLOCK,), tl.int32)
    end = seq + num_seqs
    for _ in range(halvings):
        middle = (seq + end) // 2
        begun = tl.load(cu_query + middle, mask=there, other=0) <= row
        seq = tl.where(begun, middle, seq)
        end = tl.where(begun, end, middle)
    first = tl.load(cu_query + seq, mask=there, other=0)
    behind = tl.load(cu_query + seq + 1, mask=there, other=0)
    tl.store(seqs + row, seq, mask=there)
    kv_len = tl.load(kv_lens + seq, mask=there, other=0)
    tl.store(limits + row, kv_len - behind + row + 1, mask=there)
    begins = there & ((row - tl.maximum(first, begin)) % PER_ITEM == 0)
    number = tl.cumsum(begins.to(tl.int32), 0)
    own = items + tl.program_id(0) * item_stride
    tl.store(own + number - 1, place, mask=begins)
    num_items = tl.max(number, 0)
    for start in range(0, most_items + 1, BLOCK):
        item = start + place
        empty = (item >= num_items) & (item <= most_items)
        tl.store(own + item, tl.zeros((BLOCK,), tl.int32) + count, mask=empty)


def list_rows(
    cu_query: torch.Tensor,  # [seqs + 1] int32
    kv_lens: torch.Tensor,  # [seqs] int32
    listed: ListedRows,
) -> None:
    """Fill `seqs`, `limits` and `items` of a step. All its rows are rows of sequences."""
    assert listed.at_once <= LISTED_ROWS
    num_seqs = len(kv_lens)
    _list_kernel[(len(listed.items),)](
        cu_query, kv_lens, listed.seqs, listed.limits, listed.items, len(listed.limits), num_seqs,
        num_seqs.bit_length(), listed.at_once, listed.most_items, listed.items.stride(0),
        PER_ITEM=listed.per_item, BLOCK=LISTED_ROWS, num_warps=4,
    )  # fmt: skip
