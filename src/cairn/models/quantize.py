"""Weight-only int8: each output row of a matrix as int8 numbers and one scale.

A CPU that generates one token at a time waits for weights, and int8 has a quarter of the bytes.
Activations are rounded to bfloat16 for the int8 product. With many rows compute is the limit, not
memory, so the weights are widened again. Both ways agree up to the order of sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

_FEW_ROWS = 16


@dataclass(frozen=True, slots=True)
class Int8Matrix:
    """[out, in] weights as int8, with a scale per output row."""

    weight: torch.Tensor  # [out, in] int8
    scale: torch.Tensor  # [out] float32
    scale_bf16: torch.Tensor  # [out]

    @classmethod
    def of(cls, dense: torch.Tensor) -> Int8Matrix:
        wide = dense.float()
        # Rounded to what the product multiplies by, so that both ways agree.
        scale = (wide.abs().amax(1) / 127).clamp(min=1e-12).to(torch.bfloat16)
        weight = (wide / scale.float()[:, None]).round().clamp(-127, 127).to(torch.int8)
        return cls(weight, scale.float(), scale)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] -> [rows, out], both rounded to bfloat16 however many rows there are."""
        rounded = x.to(torch.bfloat16)
        # torch's kernel reads columns by 16, and beyond the end of other matrices.
        if 0 < x.shape[0] <= _FEW_ROWS and x.shape[1] % 16 == 0:
            packed = torch._weight_int8pack_mm(rounded, self.weight, self.scale_bf16)
            return packed.to(x.dtype)
        return F.linear(rounded.to(x.dtype), self.dense()).to(torch.bfloat16).to(x.dtype)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows by number, widened: an embedding lookup."""
        return self.weight[ids].float() * self.scale[ids, None]

    def dense(self) -> torch.Tensor:
        return self.weight.float() * self.scale[:, None]


@dataclass(frozen=True, slots=True)
class QuantizationError:
    """Root mean square of what rounding changed, relative to the weights."""

    overall: float
    worst: float
    worst_name: str

    def __str__(self) -> str:
        return (
            f"int8 weights: relative error {100 * self.overall:.2f} % (rms), at most "
            f"{100 * self.worst:.2f} % ({self.worst_name})"
        )
