"""The backend protocol, and the registry that finds one by name.

A backend computes attention for a batch over the paged KV cache. It is imported only when it is
asked for, and says itself whether it can run here.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from cairn.attention.batch import AttentionBatch
from cairn.errors import ConfigError
from cairn.memory.groups import LayerGroup
from cairn.memory.kv_pool import KVPool


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


class AttentionBackend(Protocol):
    name: str

    def __init__(self, shape: AttentionShape, pool: KVPool) -> None: ...

    @staticmethod
    def unavailable_reason(device: torch.device) -> str | None:
        """Why this backend cannot run on the device; None if it can."""
        ...

    def prepare(self, batch: AttentionBatch) -> Any:
        """Host work of a step, shared by all its layers. The result goes to `forward`."""
        ...

    def forward(self, layer: int, query: torch.Tensor, metadata: Any) -> torch.Tensor:
        """query [rows, heads, head_dim] -> [rows, heads, head_dim].

        The new rows' keys and values are in the pool already.
        """
        ...


_BACKENDS: Mapping[str, str] = {
    "torch": "cairn.attention.torch_backend:TorchBackend",
}
"""name -> "module:class"."""


def backend_names() -> tuple[str, ...]:
    return tuple(_BACKENDS)


def backend_class(name: str) -> type[AttentionBackend]:
    if name not in _BACKENDS:
        raise ConfigError(
            f"attention_backend is {name!r}; choose one of auto, {', '.join(_BACKENDS)}"
        )
    module, _, attribute = _BACKENDS[name].partition(":")
    found: type[AttentionBackend] = getattr(importlib.import_module(module), attribute)
    return found


def resolve_backend(name: str, device: torch.device) -> type[AttentionBackend]:
    """The named backend, or an error that says why it cannot run. `auto` is torch."""
    cls = backend_class("torch" if name == "auto" else name)
    reason = cls.unavailable_reason(device)
    if reason is not None:
        raise ConfigError(f"attention_backend {name!r} cannot run on {device}: {reason}")
    return cls
