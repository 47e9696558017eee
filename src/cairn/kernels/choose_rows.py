"""The k best of many scores of each row, in CUDA C++ (choose_rows.cu).

It computes the same as `top_rows.top_rows`, in one launch. The blocks of a cluster share a row and
read each other's shared memory, which Triton cannot express.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

import torch

from cairn.kernels.cuda_source import CudaKernel, compile_source, device_refusal
from cairn.kernels.interface import MOST_SCORES
from cairn.kernels.precompile import is_collecting

_FOLDER = Path(__file__).parent
_ARGUMENTS = struct.Struct("6Q2q3i4x")  # struct Arguments in the source
_THREADS = 1024
_CLUSTERS = 1, 2, 4, 8  # blocks of a cluster
_MOST_LISTED = 6144
_MOST_WORDS = 2**13  # of 32 scores each, in a block's map


def refusal(device: torch.device) -> str | None:
    """Why the kernel does not run on this device; None if it does."""
    return device_refusal(device)


def constants_of(threads: int = _THREADS, listed: int = _MOST_LISTED) -> dict[str, int]:
    """The macros that the source needs."""
    return {"THREADS": threads, "MOST_LISTED": listed, "HALF": 0}


def source() -> str:
    return "".join((_FOLDER / name).read_text() for name in ("hopper.cuh", "choose_rows.cu"))


def shared_bytes(constants: dict[str, int], words: int) -> int:
    """Of a block: struct Shared, and two maps."""
    own = 3 * 4 * 2048 + 12 * constants["MOST_LISTED"] + constants["THREADS"] // 8 + 32
    return own + 8 * words


def cluster_of(rows: int, length: int, clusters: Mapping[int, int]) -> int:
    """Number of blocks that share a row. `clusters` is the number of clusters of each size that
    run at once."""
    fitting = [size for size in clusters if words_of(length, size) <= _MOST_WORDS]
    return max((size for size in fitting if rows <= clusters[size]), default=fitting[0])


def words_of(length: int, cluster: int) -> int:
    """Words of the map of a block's part, rounded up to whole 16 bytes."""
    return -(-length // (32 * cluster * 4)) * 4


def pack(tensors: tuple[torch.Tensor, ...], k: int, page_size: int, words: int) -> bytes:
    """Pack the kernel's arguments: tensors `scores` to `slots`, and sizes."""
    scores, table = tensors[0], tensors[3]
    pointers = (tensor.data_ptr() for tensor in tensors)
    return _ARGUMENTS.pack(*pointers, scores.stride(0), table.stride(0), k, page_size, words)


class ChooseRows:
    """The kernel, compiled and loaded on one device."""

    def __init__(self, device: torch.device) -> None:
        """Raises KernelUnavailableError if the kernel cannot be compiled or loaded."""
        self._constants = constants_of()
        cubin = compile_source(source(), self._constants, "sm_90")
        most = shared_bytes(self._constants, _MOST_WORDS)
        self._kernel = CudaKernel(cubin, "choose_rows", _THREADS, most, device)
        self._clusters = {size: self._kernel.most_clusters(size) for size in _CLUSTERS}

    def __call__(
        self,
        scores: torch.Tensor,  # [rows, length] float32; rows begin at multiples of 16 bytes
        limits: torch.Tensor,  # [rows] int32; scores from here on are ignored
        seqs: torch.Tensor,  # [rows] int32
        page_table: torch.Tensor,  # [seqs, pages] int32
        positions: torch.Tensor,  # [rows, k] int32, contiguous
        slots: torch.Tensor,  # [rows, k] int32, contiguous
        *,
        page_size: int,
    ) -> None:
        """Write the positions of each row's k best scores, ascending and padded with -1, and where
        these rows are in the pool: page * page_size + offset."""
        rows, length = scores.shape
        assert length <= MOST_SCORES and scores.stride(0) % 4 == 0
        cluster = cluster_of(rows, length, self._clusters)
        words = words_of(length, cluster)
        tensors = scores, limits, seqs, page_table, positions, slots
        arguments = pack(tensors, positions.shape[1], page_size, words)
        if is_collecting():  # scores are not initialised then
            return
        self._kernel.launch(
            (rows * cluster, 1),
            arguments,
            cluster=cluster,
            shared_bytes=shared_bytes(self._constants, words),
            pdl=True,
        )
