"""The attention interface for model layers: store a step's new rows, then attend."""

from __future__ import annotations

from copy import copy

import torch

from cairn.attention.backend import AttentionBackend, Replayable, SparseBackend
from cairn.attention.batch import AttentionBatch, IndexQuery, Scoring
from cairn.attention.latent import LatentHeads
from cairn.kernels.cpu import CpuKernels
from cairn.kernels.fp8_rows import hadamard, is_narrow
from cairn.kernels.interface import Normed, ScoringHeads
from cairn.memory.kv_pool import KVPool
from cairn.memory.layout import INDEX, LATENT


class Attend:
    """Attention of one step, for all layers."""

    def __init__(
        self, pool: KVPool, backend: AttentionBackend, batch: AttentionBatch, metadata: object
    ) -> None:
        """`metadata` is the result of the backend's `prepare` for this batch."""
        self._pool = pool
        self._backend = backend
        self._indexed: SparseBackend | None = None
        if isinstance(backend, SparseBackend) and backend.reads_index:
            self._indexed = backend
        self._batch = batch
        self._metadata = metadata
        self._wanted: torch.Tensor | None = None

    def only(self, rows: torch.Tensor) -> Attend:
        """The same, for a layer of which only these rows [n] are read. The outputs of others may be
        any numbers."""
        own = copy(self)
        own._wanted = rows
        return own

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key_value: torch.Tensor,
        scoring: Scoring | None = None,
    ) -> torch.Tensor:
        """`write`, then `forward`, of what `_with_hadamard` returns."""
        query, key_value = self._with_hadamard(layer, query, key_value)
        self.write(layer, key_value, query)
        return self.forward(layer, query, scoring)

    def write(self, layer: int, key_value: torch.Tensor, query: torch.Tensor | None = None) -> None:
        """Store the new rows in the first part of the layer's layout: for keys and values
        [rows, 2 * kv_heads, head_dim], keys first. With `query` [rows, heads, head_dim], keys of
        e4m3 get scales that suit it."""
        self._pool.write(layer, *self._places(layer), key_value, query=query)

    def write_rotated(
        self,
        layer: int,
        qkv: torch.Tensor,  # [rows, (heads + 2 * kv_heads) * head_dim or more], as projected
        heads: int,
        cos_sin: tuple[torch.Tensor, torch.Tensor],  # [rows, 1, head_dim] each
        norm: tuple[torch.Tensor, torch.Tensor, float] | None,  # q and k weights per head, eps
        scoring: ScoringHeads | None = None,
        cpu: CpuKernels | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalize, rotate and store the new rows in one kernel. Needs CUDA and Triton, or float32
        and kernels for the CPU, which take no `scoring`.

        Returns the query and the query that scores pages, each [rows, heads, head_dim]. Without
        `scoring` they are the same tensor.
        """
        pool, places = self._pool.part(layer), self._places(layer)
        if cpu is not None and not is_narrow(pool.dtype):
            query = cpu.rotate_and_store(qkv, heads, cos_sin, norm, pool, *places)
            return query, query
        if cpu is not None:  # the kernel stores float32: let every row be a page
            rows = torch.arange(len(qkv), dtype=torch.int32)
            kept = qkv.new_empty(len(qkv), pool.shape[1], 1, pool.shape[3])
            query = cpu.rotate_and_store(qkv, heads, cos_sin, norm, kept, rows, 0 * rows)
            query, key_value = self._with_hadamard(layer, query, kept[:, :, 0])
            self.write(layer, key_value, query)
            return query, query
        from cairn.kernels.rope_kv import rope_kv

        q_weight, k_weight, eps = (None, None, 0.0) if norm is None else norm
        return rope_kv(
            *(qkv, *cos_sin, q_weight, k_weight, eps, pool, *places, heads),
            scoring,
            self._pool.scales.get(layer, (0.0, 0.0)),
            hadamard=layer in self._pool.hadamard,
        )

    def forward(
        self, layer: int, query: torch.Tensor, scoring: Scoring | None = None
    ) -> torch.Tensor:
        """Attention output of query [rows, heads, head_dim], in the same shape.

        The new rows must be stored already. Layers with their own landmarks pass `scoring`.
        """
        if self._wanted is not None:
            rows, metadata = self._wanted, self._metadata
            found = self._backend.forward_rows(layer, query, rows, metadata, scoring)
            if found is not None:
                return torch.empty_like(query).index_copy_(0, rows, found) if len(rows) else query
        return self._backend.forward(layer, query, self._metadata, scoring)

    def rotates(self, layer: int) -> bool:
        """Whether `rotate_and_store` can store latent rows of a layer: not in 8 bits."""
        return not is_narrow(self._pool.part(layer, LATENT).dtype)

    def rotate_and_store(
        self,
        layer: int,
        part: str,  # latent rows, or index keys
        first: int,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        query: torch.Tensor,
        rows: Normed,
    ) -> None:
        """Rotate the heads of a query in place, and normalize, rotate and store the new rows of a
        part, in one kernel (`rope_latent`). Needs CUDA and Triton, and that the layer `rotates`."""
        from cairn.kernels.rope_latent import rope_latent

        places = self._places(layer, part)
        rope_latent(query, first, cos_sin, rows, self._pool.part(layer, part), *places)

    def latent(
        self,
        layer: int,
        query: torch.Tensor,
        rows: torch.Tensor | None,
        heads: LatentHeads,
        index: IndexQuery | None = None,
    ) -> torch.Tensor:
        """Store latent rows [rows, latent + rope], unless `rotate_and_store` did, and let heads
        read them.

        query [rows, heads, nope + rope] -> values [rows, heads, value]. With `index`, which also
        stores index keys, heads read the rows that it selects. Without, and if the backend reads
        an index, they read those that the last call with one selected.
        """
        if rows is not None:
            self.write(layer, rows)
        if self._indexed is None:
            wanted = self._wanted
            if wanted is not None and not len(wanted):
                left_out = self._backend.forward_rows(layer, query, wanted, self._metadata)
                if left_out is not None:
                    return query.new_empty(*query.shape[:2], heads.value.shape[2])
            return self._backend.forward_latent(layer, query, heads, self._metadata)
        if index is not None and index.keys is not None:
            self._pool.write(layer, *self._places(layer, INDEX), index.keys, INDEX)
        return self._indexed.forward_indexed(layer, query, heads, self._metadata, index)

    def replayable(self) -> tuple[Replayable, Attend] | None:
        """How to repeat recorded CPU kernels for this step, and attention for a run of them; None
        if that cannot be done."""
        found = self._backend.replayable(self._metadata)
        if found is None:
            return None
        pages = (group.row_pages for group in self._batch.groups)
        found = found._replace(inputs=[*found.inputs, *pages, self._batch.row_offsets])
        return found, Attend(self._pool, self._backend, self._batch, found.metadata)

    @property
    def reads_index(self) -> bool:
        """Layers with an index must pass it to `latent`."""
        return self._indexed is not None

    def _with_hadamard(
        self, layer: int, query: torch.Tensor, key_value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Query, and keys and values; with a layer in `KVPool.hadamard`, query and keys times a
        Hadamard matrix."""
        if layer not in self._pool.hadamard:
            return query, key_value
        key, value = key_value.chunk(2, dim=1)
        return hadamard(query), torch.cat((hadamard(key), value), 1)

    def _places(self, layer: int, part: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Page of each new row, and its row within the page."""
        # Index keys stay on the device, under the ids of pages that may have left it.
        groups = self._pool.ids_of if part == INDEX else self._pool.group_of
        return self._batch.groups[groups[layer]].row_pages, self._batch.row_offsets
