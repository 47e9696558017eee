"""One kernel for all layers: their tensors as one pointer, and how far each is from it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """Tensors of several layers, on the device or in memory of the host that it can reach."""

    first: torch.Tensor  # that of the first layer, as int32
    shifts: torch.Tensor  # [layers] int64, where each layer begins: 16 bytes from the first one's

    @classmethod
    def of(cls, layers: Iterable[torch.Tensor], device: torch.device) -> LayerMemory:
        tensors = list(layers)
        first = tensors[0].data_ptr()
        shifts = [divmod(tensor.data_ptr() - first, 16) for tensor in tensors]
        assert not any(rest for _, rest in shifts), "tensors lie on whole cache lines"
        by = torch.tensor([shift for shift, _ in shifts], dtype=torch.int64, device=device)
        return cls(tensors[0].view(torch.int32), by)
