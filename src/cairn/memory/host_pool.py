"""Host memory for pages: holds the parts of the cache that may leave the device."""

from __future__ import annotations

import torch

from cairn.memory.groups import LayerGroup
from cairn.memory.layout import KV
from cairn.memory.pinned import CudaRegistry, PinnedMemory


class HostPool:
    """One tensor for each layer and part of a group, with the same layout as on the device."""

    def __init__(
        self, group: LayerGroup, num_pages: int, page_size: int, *, device: torch.device
    ) -> None:
        """Room for page ids 0..num_pages, where 0 is the null page. `device` can access it."""
        self.layout = group.layout.leaving
        self.num_pages = num_pages
        self.page_bytes = len(group.layers) * self.layout.page_bytes(page_size)
        """Bytes of one page in all layers."""
        places = [(layer, part) for layer in group.layers for part in self.layout.parts]
        sizes = [(num_pages + 1) * part.page_bytes(page_size) for _, part in places]
        self._pinned: PinnedMemory | None = None
        if device.type == "cuda":
            self._pinned = PinnedMemory(CudaRegistry(device), sizes)
            memory = list(self._pinned.tensors)
        else:
            # The system commits memory of a plain tensor only when it is written.
            memory = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        self._parts: dict[int, dict[str, torch.Tensor]] = {layer: {} for layer in group.layers}
        for (layer, part), own in zip(places, memory, strict=True):
            shape = (num_pages + 1, *part.page_shape(page_size))
            self._parts[layer][part.name] = own.view(part.known_dtype).view(shape)

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(self._parts)

    def part(self, layer: int, name: str = KV) -> torch.Tensor:
        """The tensor of a part, [pages, *page shape]."""
        return self._parts[layer][name]

    def tensors(self) -> list[torch.Tensor]:
        """All parts of all layers."""
        return [tensor for parts in self._parts.values() for tensor in parts.values()]

    def close(self) -> None:
        """Free the memory. Nothing may use it any more."""
        self._parts.clear()
        if self._pinned is not None:
            self._pinned.close()
