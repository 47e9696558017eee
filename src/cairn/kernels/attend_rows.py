"""Attention over selected latent rows in CUDA C++ (attend_rows.cu).

It computes the same as `row_attention.row_attention` for the shapes it supports. Some of its warps
gather rows while others multiply, and blocks merge their results in each other's shared memory.
Triton cannot express either.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from cairn.kernels.cuda_source import (
    CudaKernel,
    KernelUnavailableError,
    compile_source,
)
from cairn.kernels.precompile import is_collecting
from cairn.kernels.sizes import blocks_of

_FOLDER = Path(__file__).parent
_ARGUMENTS = struct.Struct("128s3Q2if28x")  # struct Arguments in the source
_LATENT, _ROPE = 512, 64
_THREADS = 384
SHARED_BYTES = 3 * 64 * 2 * (_LATENT + _ROPE) + 4 * (4 * 64 + 2 * 72) + 8 * 10 + 16 + 1024
"""Of a block: struct Gathered in the source, which is aligned to 1,024 bytes."""
_MOST_PARTS = 8  # blocks of a cluster
_FIXED = 4  # time that a block needs beside its tiles, in tiles


def constants_of(heads: int, dtype: torch.dtype) -> dict[str, int]:
    """The macros that the source needs."""
    return {"HEADS": heads, "HALF": int(dtype == torch.float16)}


def source() -> str:
    names = "hopper.cuh", "latent_tiles.cuh", "attend_rows.cu"
    return "".join((_FOLDER / name).read_text() for name in names)


def clusters_of(most_clusters: Callable[[int], int]) -> dict[int, int]:
    """Clusters that run at once, for each size that fits. Raises KernelUnavailableError if none."""
    counts = {size: most_clusters(size) for size in range(1, _MOST_PARTS + 1)}
    fitting = {size: count for size, count in counts.items() if count > 0}
    if not fitting:
        raise KernelUnavailableError(
            f"a block takes {SHARED_BYTES} bytes of shared memory; the device has no room for it"
        )
    return fitting


def parts_of(lists: int, tiles: int, clusters: Mapping[int, int]) -> int:
    """Number of parts to split each list into, one for each block of a cluster. `tiles` is the
    length of a list, `clusters` the number of clusters of each size that run at once."""

    def cost(parts: int) -> int:
        return blocks_of(lists, clusters[parts]) * (_FIXED + blocks_of(tiles, parts))

    return min((parts for parts in clusters if parts <= tiles), key=cost)


def pack(
    query_map: bytes, tensors: tuple[torch.Tensor, ...], k: int, parts: int, scale: float
) -> bytes:
    """Pack the kernel's arguments: tensor map, tensors `pool` to `out`, sizes, scale."""
    pointers = (tensor.data_ptr() for tensor in tensors)
    tiles = blocks_of(blocks_of(k, 64), parts)
    return _ARGUMENTS.pack(query_map, *pointers, k, tiles, scale * math.log2(math.e))


class AttendRows:
    """The kernel for one shape and device, compiled and loaded."""

    def __init__(self, heads: int, dtype: torch.dtype, device: torch.device) -> None:
        """Raises KernelUnavailableError if the kernel cannot be compiled or loaded."""
        cubin = compile_source(source(), constants_of(heads, dtype), "sm_90a")
        self._kernel = CudaKernel(cubin, "attend_rows", _THREADS, SHARED_BYTES, device)
        self._clusters = clusters_of(self._kernel.most_clusters)
        self._head_tiles = heads // 64

    def __call__(
        self,
        query: torch.Tensor,  # [queries, heads, latent + rope], contiguous
        pool: torch.Tensor,  # [pages, page_size, latent + rope]
        slots: torch.Tensor,  # [queries, k] int32, -1 for none
        out: torch.Tensor,  # [queries, heads, latent], contiguous
        *,
        scale: float,
    ) -> None:
        """Attention of each query over the rows of its list. An empty list gives zero."""
        (queries, _, width), k = query.shape, slots.shape[1]
        parts = parts_of(queries * self._head_tiles, blocks_of(k, 64), self._clusters)
        query_map = self._kernel.describe(query.view(-1, width), 64)
        arguments = pack(query_map, (pool, slots, out), k, parts, scale)
        if not is_collecting():  # `slots` is not initialised then
            grid = parts, self._head_tiles, queries
            self._kernel.launch(grid, arguments, cluster=parts, pdl=True)
