"""Sparse attention of single rows by a kernel for CPUs, which reads the cache in place. It computes
the same as `torch_sparse`."""

from __future__ import annotations

import torch

from cairn.attention.backend import AttentionShape
from cairn.attention.hsa.metadata import Tile
from cairn.kernels.cpu import HEAD_DIMS, STRATEGIES, SparseStep
from cairn.memory.kv_pool import KVPool
from cairn.memory.landmarks import LandmarkPool
from cairn.sparsity.config import SparseConfig
from cairn.sparsity.policy import Policy

_LANES = 16  # numbers that the kernel reads at once


class CpuSparse:
    def __init__(
        self, config: SparseConfig, shape: AttentionShape, pool: KVPool, landmarks: LandmarkPool
    ) -> None:
        assert config.policy is not None and shape.cpu is not None
        self._config = config
        self._policy = config.policy
        self._kernels = shape.cpu
        self._pool = pool
        self._landmarks = landmarks
        self._scale = shape.scale

    @staticmethod
    def serves(
        config: SparseConfig, shape: AttentionShape, pool: KVPool, landmarks: LandmarkPool
    ) -> bool:
        policy = config.policy
        assert policy is not None
        if shape.cpu is None or policy.observed or type(policy).score is not Policy.score:
            return False
        merges = config.fusion == "lse" and not config.null_split and config.top_p is None
        caches = [pool.part(layer) for layer in config.layers]
        half = policy.landmark_width // (2 if policy.reach else 1)
        return (
            merges
            and not config.landmark_rows
            and all(c.dtype == torch.float32 and c.shape[-1] in HEAD_DIMS for c in caches)
            and landmarks.shape.dtype == torch.float32
            and half % _LANES == 0
        )

    def forward(
        self,
        layer: int,
        tile: Tile,
        query: torch.Tensor,
        scoring: torch.Tensor,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Write the output of a tile of single rows to `out`. Returns the places of the pages that
        they select, [rows, kv_heads, k].

        query, scoring and out are [rows of the step, heads, dim] float32.
        """
        assert out.is_contiguous()
        config, policy, count = self._config, self._policy, len(tile.rows)
        cache, landmarks = self._pool.part(layer), self._landmarks
        vectors, bias = landmarks.of_layer(layer)
        own = scoring if len(scoring) == 1 else scoring[tile.rows]
        query, mapped = query.contiguous(), policy.map_query(own).contiguous()
        candidates = tile.page_table.shape[1]
        topk = min(config.topk_of(layer), candidates)
        index = tile.rows.new_empty(count, cache.shape[1] // 2, topk)
        step = SparseStep(
            *(query.data_ptr(), mapped.data_ptr(), tile.rows.data_ptr(), count, query.shape[1]),
            *(tile.positions.data_ptr(), tile.limits.data_ptr()),
            *(tile.window_pages.data_ptr(), tile.window_pages.shape[1]),
            *(tile.page_table.data_ptr(), tile.generations.data_ptr(), candidates),
            *(vectors.data_ptr(), None if bias is None else bias.data_ptr()),
            *(landmarks.sealed.data_ptr(), vectors.shape[1], vectors.shape[2]),
            *(self._scale, policy.shape.scale, policy.reach),
            *(STRATEGIES.index(config.strategy), config.sinks, topk),
            *(out.data_ptr(), index.data_ptr()),
        )
        self._kernels.attend_sparse(step, cache, config.units)
        return index
