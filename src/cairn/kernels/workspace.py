"""Memory for data passed between the kernels of a layer; all layers of a step share it."""

from __future__ import annotations

import torch


class Workspace:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: dict[str, torch.Tensor] = {}

    def take(self, name: str, *size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return an uninitialised tensor; it may reuse the memory taken before under this name."""
        held = self._held.get(name)
        if held is None or held.shape != size or held.dtype != dtype:
            held = torch.empty(size, dtype=dtype, device=self._device)
            self._held[name] = held
        return held
