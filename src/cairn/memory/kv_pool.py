"""The tensors behind page ids: keys and values of every layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cairn.memory.groups import LayerGroup


class KVPool:
    """K and V of each layer in one tensor [pages, 2 * kv_heads, page_size, head_dim], keys first.

    One kv head's slice of a page is contiguous, which is what selection reads and a tier moves,
    and a row's key and value are written at once. Page 0 is the null page.
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
        *,
        hot_slots: int = 0,
    ) -> None:
        """`num_pages[g]` pages of each group behind the null page; a group of device copies has
        `hot_slots` more behind those, which no page table names."""
        self.page_size = page_size
        self.kv_heads = kv_heads
        self.group_of: dict[int, int] = {}
        self.layers: dict[int, torch.Tensor] = {}
        for g, group in enumerate(groups):
            extra = 0 if group.copy_of is None else hot_slots
            shape = (num_pages[g] + 1 + extra, 2 * kv_heads, page_size, head_dim)
            for layer in group.layers:
                self.group_of[layer] = g
                # Kernels of others multiply masked slots by zero: those must hold numbers.
                make = torch.zeros if device.type == "cuda" else torch.empty
                self.layers[layer] = make(shape, dtype=dtype, device=device)

    def keys(self, layer: int) -> torch.Tensor:
        """[pages, page_size, kv_heads, head_dim], a view"""
        return self.layers[layer][:, : self.kv_heads].transpose(1, 2)

    def values(self, layer: int) -> torch.Tensor:
        """[pages, page_size, kv_heads, head_dim], a view"""
        return self.layers[layer][:, self.kv_heads :].transpose(1, 2)

    @staticmethod
    def page_bytes(
        group: LayerGroup, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        return 2 * len(group.layers) * page_size * kv_heads * head_dim * dtype.itemsize

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.layers.values())

    def write(
        self,
        layer: int,
        pages: torch.Tensor,  # [rows] page id of each row
        offsets: torch.Tensor,  # [rows] row within its page
        key_value: torch.Tensor,  # [rows, 2 * kv_heads, head_dim], keys first
    ) -> None:
        self.layers[layer][pages, :, offsets] = key_value

    def clear(self, group: int, pages: torch.Tensor) -> None:
        """Zero pages, [n] ids, in all layers of a group."""
        for layer, g in self.group_of.items():
            if g == group:
                self.layers[layer].index_fill_(0, pages, 0)

    def fill_page(self, group: int, page: int, value: float) -> None:
        """Overwrite a page in all layers of a group; tests poison free pages with NaN."""
        for layer, g in self.group_of.items():
            if g == group:
                self.layers[layer][page] = value
