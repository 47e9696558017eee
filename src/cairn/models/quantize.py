"""int8 weights: codes of 8 bits, with a scale for every 32 of them, made from float weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cairn.models.blocks import BLOCK, Codes


def to_int8(dense: torch.Tensor) -> Codes:
    """The matrix [outputs, columns] rounded to 8 bits; columns are a multiple of 32."""
    blocks = torch.unflatten(dense.float(), 1, (-1, BLOCK))
    # Rounded to float16 first, so that the codes fit the scale that is kept.
    scale = (blocks.abs().amax(-1) / 127).to(torch.float16)
    codes = (blocks / scale.float()[..., None]).nan_to_num(0, 0, 0).round().clamp(-127, 127)
    return Codes((codes.flatten(1) + 128).to(torch.uint8), scale, offset=128, bits=8)


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
