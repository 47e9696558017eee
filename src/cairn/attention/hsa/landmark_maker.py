"""Makes the landmarks of complete pages: by a kernel, or as their policy does it."""

from __future__ import annotations

from functools import cached_property
from typing import get_args

import torch

from cairn.attention.backend import AttentionShape
from cairn.attention.batch import Scoring
from cairn.attention.hsa.metadata import CompletedPages
from cairn.kernels.interface import Pooling
from cairn.memory.kv_pool import KVPool
from cairn.memory.landmarks import LandmarkPool
from cairn.sparsity.config import SparseConfig
from cairn.sparsity.policy import Policy


class LandmarkMaker:
    """All rows of a complete page must be in the pool when its landmark is made."""

    def __init__(
        self,
        config: SparseConfig,
        shape: AttentionShape,
        pool: KVPool,
        landmarks: LandmarkPool,
        *,
        kernels: bool,
    ) -> None:
        assert config.policy is not None
        self._layers = config.layers
        self._units = config.units
        self._policy = config.policy
        self._shape = shape
        self._pool = pool
        self._landmarks = landmarks
        self.pooling = _pooling(config.policy) if kernels else None
        """The kernel; None if the policy makes landmarks itself."""

    def of_layer(
        self, layer: int, completed: CompletedPages, query: torch.Tensor, scoring: Scoring | None
    ) -> None:
        """Make the landmarks of pages that a step with this query completes."""
        pages, kv_pages, last_rows = completed
        if self.pooling is None:
            self.by_policy(
                layer, pages, kv_pages, None if scoring is None else scoring.prior[last_rows]
            )
            return
        from cairn.kernels.landmark import pool_landmarks

        pool_landmarks(
            *(pages, kv_pages, self._pool.part(layer), *self._landmarks.of_layer(layer)),
            pooling=self.pooling,
            scale=self._shape.scale,
            prior=query if scoring is None else scoring.prior,
            last_rows=last_rows,
        )

    def of_all_layers(self, pages: torch.Tensor, kv_pages: torch.Tensor) -> None:
        """Make the landmarks of pages [n] in all layers, for policies that need only keys."""
        if self.pooling is None:
            for layer in self._layers:
                self.by_policy(layer, pages, kv_pages, None)
            return
        from cairn.kernels.landmark import pool_landmarks

        first = self._layers[0]
        pool_landmarks(
            *(pages, kv_pages, self._pool.part(first), *self._landmarks.of_layer(first)),
            pooling=self.pooling,
            scale=self._shape.scale,
            shifts=self._layer_shifts,
        )

    def by_policy(
        self, layer: int, pages: torch.Tensor, kv_pages: torch.Tensor, prior: torch.Tensor | None
    ) -> None:
        # [pages, size, kv_heads, dim]
        keys = self._pool.read_keys(layer, kv_pages, self._shape.dtype, self._units)
        self._landmarks.save(layer, pages, *self._policy.landmark(keys, prior))

    @cached_property
    def _layer_shifts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Offsets of each layer's KV and landmarks from those of the first layer."""
        from cairn.kernels.layer_memory import LayerMemory

        device = self._shape.device
        kv = LayerMemory.of((self._pool.part(layer) for layer in self._layers), device)
        vectors = LayerMemory.of((self._landmarks.vectors[layer] for layer in self._layers), device)
        return kv.shifts, vectors.shifts


def _pooling(policy: Policy) -> Pooling | None:
    """The kernel for this policy's landmarks; None if there is none, or if a subclass overrides
    `landmark`."""
    for kind in type(policy).__mro__:
        if "pooling" in vars(kind):
            return next((name for name in get_args(Pooling) if name == policy.pooling), None)
        if "landmark" in vars(kind):
            return None
    return None
