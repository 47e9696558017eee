"""The tensors behind page ids: keys and values of every layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cairn.memory.groups import LayerGroup


class KVPool:
    """K and V per layer, stored [pages, kv_heads, page_size, head_dim].

    One kv head's slice of a page is contiguous, which is what selection reads and a tier moves.
    Row 0 belongs to the null page.
    """

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        num_pages: Sequence[int],
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.page_size = page_size
        self.group_of: dict[int, int] = {}
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        for g, group in enumerate(groups):
            shape = (num_pages[g] + 1, kv_heads, page_size, head_dim)
            for layer in group.layers:
                self.group_of[layer] = g
                self.keys[layer] = torch.empty(shape, dtype=dtype, device=device)
                self.values[layer] = torch.empty(shape, dtype=dtype, device=device)

    @staticmethod
    def page_bytes(
        group: LayerGroup, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        return 2 * len(group.layers) * page_size * kv_heads * head_dim * dtype.itemsize

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for pool in (self.keys, self.values) for t in pool.values())

    def write(
        self,
        layer: int,
        pages: torch.Tensor,  # [rows] page id of each row
        offsets: torch.Tensor,  # [rows] row within its page
        key: torch.Tensor,  # [rows, kv_heads, head_dim]
        value: torch.Tensor,  # [rows, kv_heads, head_dim]
    ) -> None:
        self.keys[layer][pages, :, offsets] = key
        self.values[layer][pages, :, offsets] = value

    def fill_page(self, group: int, page: int, value: float) -> None:
        """Overwrite a page in all layers of a group; tests poison free pages with NaN."""
        for layer, g in self.group_of.items():
            if g == group:
                self.keys[layer][page] = value
                self.values[layer][page] = value
