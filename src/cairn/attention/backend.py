"""The backend protocol, and the registry that finds one by name.

A backend computes attention for a batch over the paged KV cache. It is imported only when it is
asked for, and says itself whether it can run here.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from cairn.attention.batch import AttentionBatch, Scoring
from cairn.errors import ConfigError
from cairn.memory.groups import LayerGroup
from cairn.memory.kv_pool import KVPool
from cairn.sparsity.selection import Selection


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a backend must know of the model before the first step."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    page_size: int
    dtype: torch.dtype
    device: torch.device
    groups: tuple[LayerGroup, ...]
    hides_landmark_rows: bool = False
    """The last row of a page is a landmark row that dense layers do not see."""


class AttentionBackend(Protocol):
    name: ClassVar[str]

    def prepare(self, batch: AttentionBatch) -> Any:
        """Host work of a step, shared by all its layers. The result goes to `forward`."""
        ...

    def forward(
        self, layer: int, query: torch.Tensor, metadata: Any, scoring: Scoring | None = None
    ) -> torch.Tensor:
        """query [rows, heads, head_dim] -> [rows, heads, head_dim].

        The new rows' keys and values are in the pool already. `scoring` comes from layers that
        bring landmarks of their own.
        """
        ...

    def selections(self, metadata: Any, row: int) -> dict[int, Selection]:
        """Pages that a traced row of the step read, by layer."""
        ...

    def abandon(self, batch: AttentionBatch) -> None:
        """The batch was prepared and did not come to its end."""
        ...


class DenseBackend:
    """A backend that is found by name and reads the whole past, or a window of it."""

    name: ClassVar[str]

    def __init__(self, shape: AttentionShape, pool: KVPool) -> None:
        self._shape = shape
        self._pool = pool

    @staticmethod
    def unavailable_reason(device: torch.device) -> str | None:
        """Why this backend cannot run on the device; None if it can."""
        raise NotImplementedError

    def prepare(self, batch: AttentionBatch) -> Any:
        raise NotImplementedError

    def forward(
        self, layer: int, query: torch.Tensor, metadata: Any, scoring: Scoring | None = None
    ) -> torch.Tensor:
        raise NotImplementedError

    def selections(self, metadata: Any, row: int) -> dict[int, Selection]:
        return {}

    def abandon(self, batch: AttentionBatch) -> None:
        pass


_BACKENDS: Mapping[str, str] = {
    "torch": "cairn.attention.torch_backend:TorchBackend",
}
"""name -> "module:class"."""


def backend_names() -> tuple[str, ...]:
    return tuple(_BACKENDS)


def backend_class(name: str) -> type[DenseBackend]:
    if name not in _BACKENDS:
        raise ConfigError(
            f"attention_backend is {name!r}; choose one of auto, hsa, {', '.join(_BACKENDS)}"
        )
    module, _, attribute = _BACKENDS[name].partition(":")
    found: type[DenseBackend] = getattr(importlib.import_module(module), attribute)
    return found


def resolve_backend(name: str, device: torch.device) -> type[DenseBackend]:
    """The named backend, or an error that says why it cannot run. `auto` is torch."""
    cls = backend_class("torch" if name == "auto" else name)
    reason = cls.unavailable_reason(device)
    if reason is not None:
        raise ConfigError(f"attention_backend {name!r} cannot run on {device}: {reason}")
    return cls
