"""Rounds float matrices when they are loaded: to codes of 4 or 8 bits, or to FP8."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from cairn.models.blocks import BLOCK, Codes, Kept
from cairn.models.fp8 import draw_fp8, fit_fp8


def to_int8(dense: torch.Tensor) -> Codes:
    """The matrix [outputs, columns] rounded to 8 bits; columns are a multiple of 32."""
    return _rounded(dense, 127, 8)


def to_int4(dense: torch.Tensor) -> Codes:
    """The same, rounded to 4 bits."""
    return _rounded(dense, 7, 4)


def _rounded(dense: torch.Tensor, largest: int, bits: int) -> Codes:
    """A scale for every 32 columns makes their largest weight `largest`."""
    blocks = torch.unflatten(dense.float(), 1, (-1, BLOCK))
    # Rounded to float16 first, so that the codes fit the scale that is kept.
    scale = (blocks.abs().amax(-1) / largest).to(torch.float16)
    codes = (blocks / scale.float()[..., None]).nan_to_num(0, 0, 0).round().clamp(-largest, largest)
    offset = largest + 1
    return Codes((codes.flatten(1) + offset).to(torch.uint8), scale, offset=offset, bits=bits)


def draw_codes(shape: tuple[int, ...], std: float, generator: torch.Generator, bits: int) -> Codes:
    """Random codes in the form that `to_int4` or `to_int8` returns."""
    device, offset = generator.device, 2 ** (bits - 1)
    codes = torch.empty(shape, dtype=torch.uint8, device=device)
    codes.random_(1, 2 * offset, generator=generator)
    scale = std * (12 / ((2 * offset - 1) ** 2 - 1)) ** 0.5
    scales = torch.full((shape[0], shape[1] // BLOCK), scale, dtype=torch.float16, device=device)
    return Codes(codes, scales, offset=offset, bits=bits)


@dataclass(frozen=True, slots=True)
class Rounding:
    name: str
    round: Callable[[torch.Tensor], Kept]
    draw: Callable[[tuple[int, ...], float, torch.Generator], Kept]
    """Random weights [..., outputs, columns] with a standard deviation, as `round` would make
    them."""
    columns: int
    """Matrices whose width is no multiple of this stay as they are."""

    def in_pieces(self, dense: torch.Tensor) -> Iterator[tuple[torch.Tensor, Kept]]:
        """Some outputs at a time, as they are and rounded, so that little memory is needed."""
        for piece in torch.split(dense, max(1, MOST_ROUNDED // dense.shape[1])):
            yield piece, self.round(piece)


MOST_ROUNDED = 2**26
"""Weights that are rounded at once, or one output."""

INT8 = Rounding("int8", to_int8, partial(draw_codes, bits=8), BLOCK)
ROUNDINGS: Mapping[str, Rounding] = {
    rounding.name: rounding
    for rounding in (
        INT8,
        Rounding("int4", to_int4, partial(draw_codes, bits=4), BLOCK),
        Rounding("fp8", fit_fp8, draw_fp8, 16),
    )
}
EMBEDDINGS = INT8
"""How embedding and output head are rounded, with every form of the layers. In SmolLM2, FP8 there
costs almost as much as FP8 in all layers (docs/quality.md)."""


@dataclass(frozen=True, slots=True)
class QuantizationError:
    """Root mean square of what rounding changed, relative to the weights."""

    name: str
    ends: str
    """How embedding and output head were rounded."""
    overall: float
    worst: float
    worst_name: str

    def __str__(self) -> str:
        return (
            f"{self.name} weights, embedding and output head {self.ends}: relative error "
            f"{100 * self.overall:.2f} % (rms), at most {100 * self.worst:.2f} % "
            f"({self.worst_name})"
        )
