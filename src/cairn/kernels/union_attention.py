"""Attention over the pages that neighbouring rows selected, in CUDA C++ (union_attention.cu).

It computes the same as `sparse_extend.attend_selected` for the shapes it supports, and builds the
unions itself. Its warps skip pages that none of their rows selected; Triton cannot express this.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path

import torch

from cairn.kernels.cuda_source import (
    ALL_SHARED,
    MOST_SHARED,
    CudaKernel,
    compile_source,
    device_refusal,
)
from cairn.kernels.paged_extend import ExtendBlocks
from cairn.kernels.precompile import is_collecting
from cairn.kernels.sizes import power_of_two
from cairn.kernels.sparse_shape import SparseShape

_FOLDER = Path(__file__).parent
_ARGUMENTS = struct.Struct("128s128s13Q3qf60x")  # struct Arguments in the source


@dataclass(frozen=True, slots=True)
class Tuning:
    """How the work is cut into blocks. Results do not depend on it."""

    rows: int  # rows per block, at most 32
    tiles: int  # tiles of 16 product rows per warp, one or two
    stages: int  # pages in the ring, in flight or being read
    blocks: int  # blocks that should fit on a multiprocessor

    def warps(self, shape: SparseShape) -> int:
        return self.rows * (shape.heads // shape.kv_heads) // (16 * self.tiles)

    @classmethod
    def of(cls, shape: SparseShape, rows: int | None = None, tiles: int = 1) -> Tuning | None:
        """Tuning for 16 warps per multiprocessor, or None if no block fits.

        With heads of 128 or two tiles, which take twice the registers, it is 8 warps. It uses
        fewer if otherwise less than three pages per block would fit, or two with heads of 128.
        """
        group = shape.heads // shape.kv_heads
        least = 16 * tiles // group  # rows per warp
        if rows is None:
            rows = max(least, min(32, 128 // group))
            while rows > least and rows * shape.topk > 1024:
                rows //= 2
        warps = rows // least
        together = 16 if shape.head_dim == 64 and tiles == 1 else 8
        for blocks in range(max(1, together // warps), 0, -1):
            room = min(ALL_SHARED // blocks - 1024, MOST_SHARED) - _union_bytes(shape, rows, warps)
            stages = min(12, room // _stage_bytes(shape))
            table = 8 * power_of_two(2 * rows * shape.topk)
            few = 3 if blocks > 1 and shape.head_dim == 64 else 2
            if stages >= few and table <= stages * _stage_bytes(shape):
                return cls(rows, tiles, stages, blocks)
        return None


def _stage_bytes(shape: SparseShape) -> int:
    landmarks = 0 if shape.by_lse else 16 * shape.landmark_width
    return 2 * 2 * shape.page_size * shape.head_dim + landmarks


def _union_bytes(shape: SparseShape, rows: int, warps: int) -> int:
    entries = rows * shape.topk
    passes = -(-entries // (32 * warps))
    return 20 * entries + -(-4 * passes * warps // 8) * 8


def shared_bytes(shape: SparseShape, tuning: Tuning) -> int:
    """Bytes of shared memory per block: its ring of pages and its union."""
    union = _union_bytes(shape, tuning.rows, tuning.warps(shape))
    return tuning.stages * _stage_bytes(shape) + union


def refusal(shape: SparseShape, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the kernel does not support this shape on this device; None if it does."""
    return device_refusal(device) or shape_refusal(shape, dtype)


def shape_refusal(shape: SparseShape, dtype: torch.dtype) -> str | None:
    """Like `refusal`, but judges shape and type only, not the device."""
    group = shape.heads // shape.kv_heads
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the type is {str(dtype).removeprefix('torch.')}; it has bfloat16 and float16"
    if shape.page_size != 64:
        return f"page_size is {shape.page_size}; it has 64"
    if shape.head_dim not in (64, 128):
        return f"head_dim is {shape.head_dim}; it has 64 and 128"
    if group not in (1, 2, 4, 8):
        return f"there are {group} query heads to a kv head; it has 1, 2, 4 and 8"
    if not shape.by_lse and (shape.split_query or shape.landmark_width not in (64, 128)):
        return f"landmark_width is {shape.landmark_width}; it has 64 and 128, in one part"
    if Tuning.of(shape) is None:
        return f"hsa_topk is {shape.topk}, of which unions do not fit beside pages"
    return None


def constants_of(
    shape: SparseShape, dtype: torch.dtype, tuning: Tuning, *, has_bias: bool
) -> dict[str, int]:
    """The macros that the source needs."""
    return {
        "HEADS": shape.heads,
        "KV_HEADS": shape.kv_heads,
        "DIM": shape.head_dim,
        "WIDTH": shape.landmark_width,
        "OF_KV": shape.landmark_heads // shape.kv_heads,
        "TOPK": shape.topk,
        "ROWS": tuning.rows,
        "TILES": tuning.tiles,
        "STAGES": tuning.stages,
        "BLOCKS_PER_SM": tuning.blocks,
        "HIDE_LAST": int(shape.hide_last),
        "BY_LSE": int(shape.by_lse),
        "HAS_BIAS": int(has_bias),
        "NULL_SPLIT": int(shape.null_split),
        "BOUNDED": int(shape.normalized and not shape.by_lse),
        "HALF": int(dtype == torch.float16),
    }


def source() -> str:
    return "".join((_FOLDER / name).read_text() for name in ("hopper.cuh", "union_attention.cu"))


def pack(
    maps: tuple[bytes, bytes],
    tensors: tuple[torch.Tensor, ...],
    strides: tuple[int, int, int],
    scale: float,
) -> bytes:
    """Pack the kernel's arguments: tensor maps, tensors `query` to `counts`, strides, scale."""
    pointers = (tensor.data_ptr() for tensor in tensors)
    return _ARGUMENTS.pack(*maps, *pointers, *strides, scale * math.log2(math.e))


class UnionAttention:
    """The kernel for one shape and device, compiled and loaded."""

    def __init__(
        self,
        shape: SparseShape,
        dtype: torch.dtype,
        device: torch.device,
        *,
        has_bias: bool,
        tuning: Tuning | None = None,
    ) -> None:
        """Raises KernelUnavailableError if the kernel cannot be compiled or loaded."""
        tuning = tuning or Tuning.of(shape)
        assert tuning is not None
        self._shape = shape
        self.tuning = tuning
        constants = constants_of(shape, dtype, tuning, has_bias=has_bias)
        cubin = compile_source(source(), constants, "sm_90")
        threads = 32 * tuning.warps(shape)
        shared = shared_bytes(shape, tuning)
        self.kernel = CudaKernel(cubin, "union_attention", threads, shared, device)
        self._maps: dict[tuple[int, torch.Size, int], bytes] = {}

    @property
    def rows(self) -> int:
        """Number of rows per block."""
        return self.tuning.rows

    def __call__(
        self,
        selected: torch.Tensor,  # [rows, kv_heads, topk] int32
        query: torch.Tensor,  # [rows, heads, dim]
        scoring: torch.Tensor,  # [rows, heads, width]
        pool: torch.Tensor,  # [pages, 2 * kv_heads, page_size, dim]
        vectors: torch.Tensor,  # [pages, landmark_heads, width]
        bias: torch.Tensor | None,
        page_table: torch.Tensor,  # [seqs, pages] int32
        cu_query: torch.Tensor,
        blocks: ExtendBlocks,  # `rows` rows each
        window_out: torch.Tensor,  # [rows, heads, dim]
        window_lse: torch.Tensor,  # [rows, heads] float32
        normalizer: torch.Tensor | None,  # [rows, heads], from `select_pages`
        out: torch.Tensor,  # [rows, heads, dim]; may be window_out
    ) -> torch.Tensor:
        """Write attention over window and selected pages to `out`.

        Returns the number of pages that each block and kv head read, [blocks, kv_heads].
        """
        shape = self._shape
        assert blocks.block_m == self.rows
        size = (len(blocks.seq), shape.kv_heads)
        counts = torch.empty(size, dtype=torch.int32, device=query.device)
        landmarks = shape.landmark_heads // shape.kv_heads
        maps = (
            self._map_of(pool.view(-1, shape.head_dim), shape.page_size),
            self._map_of(vectors.view(-1, shape.landmark_width), landmarks),
        )
        tensors = (
            *(query, scoring, window_lse if bias is None else bias, selected),
            *(page_table, cu_query, blocks.seq, blocks.begin, window_out, window_lse),
            *(window_lse if normalizer is None else normalizer, out, counts),
        )
        strides = query.stride(0), scoring.stride(0), page_table.stride(0)
        if is_collecting():  # `selected` is not initialised then
            return counts
        self.kernel.launch(size, pack(maps, tensors, strides, shape.scale))
        return counts

    def _map_of(self, matrix: torch.Tensor, box_rows: int) -> bytes:
        if self._shape.by_lse and matrix.shape[1] % 64:
            return bytes(128)  # a map of landmarks, which are not read
        key = matrix.data_ptr(), matrix.shape, box_rows
        found = self._maps.get(key)
        if found is None:
            found = self._maps[key] = self.kernel.describe(matrix, box_rows)
        return found
