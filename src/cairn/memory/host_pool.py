"""Host memory behind page ids: keys and values of the layers that are read sparsely."""

from __future__ import annotations

from collections.abc import Sequence

import torch


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
        pinned: bool,
    ) -> None:
        """For page ids 0..num_pages, 0 being the null page."""
        shape = (num_pages + 1, 2 * kv_heads, page_size, head_dim)
        # Untouched pages of a plain tensor cost nothing until they are written.
        self.layers = {
            layer: torch.empty(shape, dtype=dtype, pin_memory=pinned) for layer in layers
        }

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.layers.values())
