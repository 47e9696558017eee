"""Memory for what kernels of a layer hand on to each other; all layers of a step use the same."""

from __future__ import annotations

import torch


class Workspace:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: dict[str, torch.Tensor] = {}

    def take(self, name: str, *size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Uninitialised; what was taken by this name before is overwritten."""
        held = self._held.get(name)
        if held is None or held.shape != size or held.dtype != dtype:
            held = torch.empty(size, dtype=dtype, device=self._device)
            self._held[name] = held
        return held
