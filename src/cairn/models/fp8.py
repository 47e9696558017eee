"""Rounding to FP8 (e4m3), and products with FP8 matrices in torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from cairn.kernels.interface import E4M3_LARGEST, FEW_ROWS
from cairn.models.narrow import Narrow

_FITTED = 8  # scales that are tried for an output


def to_fp8(dense: torch.Tensor, span: int | None = None) -> Narrow:
    """The matrix [outputs, columns] rounded to FP8, by default with one scale for each output.

    Smaller spans would hardly make the error smaller: a float's relative error does not depend on
    its scale, and e4m3 reaches from 448 down to 0.002.
    """
    columns = dense.shape[-1]
    span = span or columns
    padded = F.pad(dense.float(), (0, -columns % span))
    spans = torch.unflatten(padded, -1, (-1, span))
    most = spans.abs().amax(-1)
    scale = torch.where(most > 0, most / E4M3_LARGEST, 1)
    numbers = (spans / scale[..., None]).clamp(-E4M3_LARGEST, E4M3_LARGEST)
    return Narrow(numbers.flatten(-2)[..., :columns].to(torch.float8_e4m3fn), scale, span)


def fit_fp8(dense: torch.Tensor) -> Narrow:
    """The same with one scale for each output: of eight between the smallest with which the output
    fits and twice that, the one that changes it least. Rounding depends on where a scale puts
    weights between powers of two, so a larger scale may be better."""
    wide = dense.float()
    best = to_fp8(wide)
    assert best.scale is not None
    scale, least = best.scale, (best.dense() - wide).square().sum(-1, keepdim=True)
    for step in range(1, _FITTED):
        tried = best.scale * 2 ** (step / _FITTED)
        rounded = (wide / tried).to(torch.float8_e4m3fn).float() * tried
        error = (rounded - wide).square().sum(-1, keepdim=True)
        scale, least = torch.where(error < least, tried, scale), torch.minimum(error, least)
    return Narrow((wide / scale).to(torch.float8_e4m3fn), scale, best.span)


def draw_fp8(shape: tuple[int, ...], std: float, generator: torch.Generator) -> Narrow:
    """Random weights in the form that `fit_fp8` returns, for a stack of matrices too."""
    drawn = torch.empty(shape, dtype=torch.bfloat16, device=generator.device)
    drawn.normal_(0, E4M3_LARGEST / 8, generator=generator).clamp_(-E4M3_LARGEST, E4M3_LARGEST)
    scale = torch.full((*shape[:-1], 1), 8 * std / E4M3_LARGEST, device=generator.device)
    return Narrow(drawn.to(torch.float8_e4m3fn), scale, shape[-1])


def fp8_product(x: torch.Tensor, matrix: Narrow, span: int | None = None) -> torch.Tensor:
    """x [rows, columns] @ matrix.T in float32: what `kernels/fp8.py` computes. More than a few rows
    are rounded to FP8, by default with scales for as many columns as those of the matrix."""
    wide = x.float()
    if len(x) > FEW_ROWS:
        wide = to_fp8(x, span or matrix.span).dense()
    return wide @ matrix.dense().t()


def readable(matrix: Narrow) -> bool:
    """Whether the kernels for a GPU can read it."""
    if matrix.values.dtype != torch.float8_e4m3fn or matrix.scale is None:
        return False
    columns = matrix.shape[-1]
    return columns % 16 == 0 and (matrix.span >= columns or matrix.span & -matrix.span >= 32)
