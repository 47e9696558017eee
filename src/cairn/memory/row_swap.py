"""Swap-in of single rows by kernels: plans like `hot_cache`, but on the device.

Layers that share a selection have one hot cache. The layer that selects makes the plan (`locate`),
and the others copy the same rows of their own (`locate_again`). Steps can be recorded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from cairn.memory.device_swap import PageCopier, SwapShape
from cairn.memory.hot_cache import HotCache
from cairn.memory.kv_pool import HostPool, KVPool

if TYPE_CHECKING:
    from cairn.kernels.swap_rows import HotRowTables


class RowSwap(PageCopier):
    def __init__(
        self,
        pool: KVPool,
        host: HostPool,
        frame_of: torch.Tensor,  # [pages] int32, 0 for none
        hot: Mapping[int, HotCache],  # by layer; one for all that share a selection
        *,
        first_hot: int,  # the row of the pool that is slot 0
        shape: SwapShape,
    ) -> None:
        from cairn.kernels.swap_rows import HotRowTables, RowScratch

        super().__init__(pool, host, frame_of, shape)
        self._first_hot = first_hot
        num_rows, device = len(frame_of) * pool.page_size, frame_of.device
        self._scratch = RowScratch.empty(shape.max_seqs * shape.topk, num_rows, device)
        self._hot: dict[int, HotRowTables] = {}
        by_cache: dict[int, HotRowTables] = {}
        for layer, own in hot.items():
            if id(own) not in by_cache:
                by_cache[id(own)] = HotRowTables.over(own.tags[0], own.used[0], num_rows)
            self._hot[layer] = by_cache[id(own)]
        self._sharing = Counter(id(tables) for tables in self._hot.values())

    @property
    def totals(self) -> list[int]:
        """Reads of rows in frames, in hot slots, and missing rows, of all layers. Waits for the
        device."""
        found = [0, 0, 0]
        distinct = {id(tables): tables for tables in self._hot.values()}
        for key, tables in distinct.items():
            for i, total in enumerate(tables.totals.tolist()):
                found[i] += self._sharing[key] * int(total)
        return found

    def locate(
        self,
        layer: int,
        positions: torch.Tensor,  # [n, k] int32 position in the sequence, -1 for none
        seqs: torch.Tensor,  # [n] int32
        page_table: torch.Tensor,  # [seqs, pages] int32
        generations: torch.Tensor,  # [seqs, pages] int32
        places: torch.Tensor,  # [n, k] int32
    ) -> None:
        """Write where each selected row is in the pool. Missing rows are copied there."""
        from cairn.kernels.swap_rows import find_rows

        find_rows(
            self._hot[layer],
            self._scratch,
            *(positions, seqs, page_table, generations, self.frame_of, places),
            page_size=self._pool.page_size,
            first_hot=self._first_hot,
        )
        self._copy(layer, places)

    def locate_again(self, layer: int) -> None:
        """Copy the missing rows of a layer that shares the selection located last."""
        self._copy(layer, None)

    def _copy(self, layer: int, places: torch.Tensor | None) -> None:
        from cairn.kernels.swap_rows import copy_rows

        copy_rows(
            self._hot[layer],
            self._scratch,
            self._host.part(layer, self._name),
            self._pool.part(layer, self._name),
            places,
            first_hot=self._first_hot,
            threads=self._threads,
        )

    def forget(self) -> None:
        """Withdraw the plan of a step that failed. Its hot caches must be emptied, too."""
        self._scratch.forget()
