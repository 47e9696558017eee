"""Decode over latent rows in CUDA C++ (latent_decode.cu).

It computes the same as `latent.latent_decode` for the shapes it supports. One half of its warps
multiplies while the other computes a softmax; Triton cannot express this.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path

import torch

from cairn.kernels.cuda_source import CudaKernel, compile_source, device_refusal
from cairn.kernels.latent import LatentShares, merge_shares
from cairn.kernels.precompile import is_collecting

_FOLDER = Path(__file__).parent
_ARGUMENTS = struct.Struct("128s128s7Qqf60x")  # struct Arguments in the source
_LATENT, _ROPE = 512, 64
_THREADS = 384
_SHARED = 3 * 64 * 2 * (_LATENT + _ROPE) + 4 * 3 * 64 + 8 * 10 + 1024  # struct Shared, aligned


def tiles_refusal(
    heads: int, latent: int, rope: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Why kernels with the tiles of `latent_tiles.cuh` do not serve these rows on this device; None
    if they do."""
    if (refused := device_refusal(device)) is not None:
        return refused
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the type is {str(dtype).removeprefix('torch.')}; it has bfloat16 and float16"
    if (latent, rope) != (_LATENT, _ROPE):
        return f"latent rows have {latent} and {rope} columns; it has {_LATENT} and {_ROPE}"
    if heads % 64:
        return f"there are {heads} heads; it has multiples of 64"
    return None


def refusal(
    heads: int, latent: int, rope: int, page_size: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Why the kernel does not serve these rows on this device; None if it does."""
    if page_size % 64:
        return f"page_size is {page_size}; it has multiples of 64"
    return tiles_refusal(heads, latent, rope, dtype, device)


def constants_of(heads: int, page_size: int, max_seqs: int, dtype: torch.dtype) -> dict[str, int]:
    """The macros that the source needs."""
    half = int(dtype == torch.float16)
    return {"HEADS": heads, "PAGE_SIZE": page_size, "MAX_SEQS": max_seqs, "HALF": half}


def source() -> str:
    names = "hopper.cuh", "latent_tiles.cuh", "latent_decode.cu"
    return "".join((_FOLDER / name).read_text() for name in names)


class LatentDecode:
    """The kernel for one shape and device, compiled and loaded."""

    def __init__(
        self, heads: int, page_size: int, max_seqs: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Raises KernelUnavailableError if the kernel cannot be compiled or loaded."""
        constants = constants_of(heads, page_size, max_seqs, dtype)
        cubin = compile_source(source(), constants, "sm_90a")
        self._kernel = CudaKernel(cubin, "latent_decode", _THREADS, _SHARED, device)
        self._maps: dict[tuple[int, torch.Size], bytes] = {}

    def __call__(
        self,
        query: torch.Tensor,  # [rows, heads, latent + rope], contiguous
        pool: torch.Tensor,  # [pages, page_size, latent + rope]
        page_table: torch.Tensor,  # [seqs, pages] int32
        kv_lens: torch.Tensor,  # [seqs] int32; sequences of length 0 are left out
        rows: torch.Tensor,  # [seqs] int32, query row of each sequence
        shares: LatentShares,  # planned by `share_pages` for these lengths
        out: torch.Tensor,  # [rows, heads, latent], contiguous
        *,
        scale: float,
    ) -> None:
        """Attention of one row of each sequence."""
        pool_map = self._maps.get((pool.data_ptr(), pool.shape))
        if pool_map is None:
            pool_map = self._kernel.describe(pool.view(-1, pool.shape[-1]), 64)
            self._maps[pool.data_ptr(), pool.shape] = pool_map
        query_map = self._kernel.describe(query.view(-1, query.shape[-1]), 64)
        tensors = page_table, kv_lens, rows, shares.pages, out, shares.partial, shares.partial_lse
        arguments = _ARGUMENTS.pack(
            query_map,
            pool_map,
            *(tensor.data_ptr() for tensor in tensors),
            page_table.stride(0),
            scale * math.log2(math.e),
        )
        if not is_collecting():  # the plan is not initialised then
            self._kernel.launch((out.shape[1] // 64, shares.programs), arguments)
        merge_shares(shares, rows, out)
