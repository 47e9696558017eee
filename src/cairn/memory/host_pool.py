"""Host memory behind page ids: keys and values of the layers that are read sparsely."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from cairn.memory.pinned import CudaRegistry, PinnedMemory


class HostPool:
    """One tensor per layer, laid out as on the device: [pages, 2 * kv_heads, page_size, dim]."""

    def __init__(
        self,
        layers: Sequence[int],
        num_pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        *,
        device: torch.device,
    ) -> None:
        """For page ids 0..num_pages, 0 being the null page; readable by `device`."""
        shape = (num_pages + 1, 2 * kv_heads, page_size, head_dim)
        self._pinned: PinnedMemory | None = None
        if device.type == "cuda":
            nbytes = math.prod(shape) * dtype.itemsize
            self._pinned = PinnedMemory(CudaRegistry(device), [nbytes] * len(layers))
            tensors = [tensor.view(dtype).view(shape) for tensor in self._pinned.tensors]
        else:
            # Untouched pages of a plain tensor cost nothing until they are written.
            tensors = [torch.empty(shape, dtype=dtype) for _ in layers]
        self.layers = dict(zip(layers, tensors, strict=True))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.layers.values())

    def close(self) -> None:
        """Let go of the memory; nothing may be using it any more."""
        self.layers.clear()
        if self._pinned is not None:
            self._pinned.close()
