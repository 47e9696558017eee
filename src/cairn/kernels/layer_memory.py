"""Lets one kernel reach the tensors of all layers: one pointer plus an offset for each layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """Tensors of several layers, on the device or in host memory that the device can access."""

    first: torch.Tensor  # the first layer's tensor, viewed as int32 [pages, words]
    shifts: torch.Tensor  # [layers] int64, offset from the first layer, in units of 16 bytes

    @classmethod
    def of(cls, layers: Iterable[torch.Tensor], device: torch.device) -> LayerMemory:
        tensors = list(layers)
        first = tensors[0].data_ptr()
        shifts = [divmod(tensor.data_ptr() - first, 16) for tensor in tensors]
        assert not any(rest for _, rest in shifts), "tensors lie on whole cache lines"
        by = torch.tensor([shift for shift, _ in shifts], dtype=torch.int64, device=device)
        return cls(tensors[0].flatten(1).view(torch.int32), by)
