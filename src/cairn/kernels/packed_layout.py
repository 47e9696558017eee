"""How kernels read a matrix of codes of 4 or 8 bits (`Codes` in models/blocks.py).

A word of 32 bits has eight codes of 4 bits, or four of 8. A block of 32 columns is a run of words:
code i of word j is column words * i + j. So neighbouring words go with neighbouring inputs, and
where 16 columns have a scale of their own, these are the first or last half of each word's codes.

Eight outputs are stored side by side: 16 words of each, a chunk, are 512 bytes that a warp reads at
once. So are the scales of eight outputs, and a scale and its minimum.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

BLOCK = 32
_CHUNK = 16  # words of an output that are stored side by side


class Packed(NamedTuple):
    """A matrix as the kernels read it. Weight: scale * sub_scale * (code - offset) + minimum *
    sub_minimum, where a scale that is not there is 1 and a minimum that is not there is 0."""

    words: torch.Tensor  # [outputs / 8, chunks, 8, 16] int32
    scale: torch.Tensor  # [outputs / 8, supers, 8, 1 or 2] float16: scale, then minimum
    inner: torch.Tensor | None  # [outputs / 8, blocks, 8, 1 or 2, subs] int8: scales, then minima
    outputs: int
    columns: int
    has_minimum: bool
    has_sub_scale: bool
    has_sub_minimum: bool
    offset: int
    bits: int

    @property
    def subs(self) -> int:
        """Inner scales of a block."""
        return 1 if self.inner is None else self.inner.shape[-1]

    @property
    def constants(self) -> dict[str, int | bool]:
        """Of its form, for the kernels."""
        blocks = self.columns // BLOCK
        return {
            "IN": self.columns,
            "BITS": self.bits,
            "OFFSET": self.offset,
            "SUPER": blocks // self.scale.shape[1],
            "SUBS": self.subs,
            "MINIMUM": self.has_minimum,
            "SUB_SCALE": self.has_sub_scale,
            "SUB_MINIMUM": self.has_sub_minimum,
        }

    @property
    def pointers(self) -> tuple[torch.Tensor, ...]:
        """All tensors; `inner`, if it is None, is not read, and replaced by another."""
        return self.words, self.scale, self.scale if self.inner is None else self.inner

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(own for own in (self.words, self.scale, self.inner) if own is not None)


def packed(
    codes: torch.Tensor,  # [outputs, columns] uint8; columns are a multiple of 32
    scale: torch.Tensor,  # [outputs, supers] float16, as minimum
    minimum: torch.Tensor | None,
    sub_scale: torch.Tensor | None,  # [outputs, blocks, subs] int8, as sub_minimum
    sub_minimum: torch.Tensor | None,
    offset: int,
    bits: int,
) -> Packed:
    """The parts of `Codes`, as the kernels read them."""
    words = _by_eight(_words(codes, bits))
    outer = torch.stack([scale] if minimum is None else [scale, minimum], -1)
    # A power of two of blocks has one scale, which is repeated for that.
    per_scale = codes.shape[1] // BLOCK // scale.shape[1]
    outer = outer.repeat_interleave(per_scale // (per_scale & -per_scale), 1)
    inner = [own for own in (sub_scale, sub_minimum) if own is not None]
    return Packed(
        words,
        _by_eight(outer),
        _by_eight(torch.stack(inner, 2)) if inner else None,
        *(codes.shape[0], codes.shape[1]),
        minimum is not None,
        sub_scale is not None,
        sub_minimum is not None,
        offset,
        bits,
    )


def _words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [outputs, columns] -> [outputs, chunks, words]"""
    many = 32 // bits
    by_word = codes.view(len(codes), -1, many, BLOCK // many)  # [outputs, blocks, code, word]
    words = torch.zeros_like(by_word[:, :, 0], dtype=torch.int32)
    for i in range(many):
        words |= by_word[:, :, i].int() << i * bits
    words = words.flatten(1)
    words = F.pad(words, (0, -words.shape[1] % _CHUNK))
    return words.view(len(words), -1, _CHUNK)


def unpacked(
    matrix: Packed,
) -> tuple[
    torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None
]:
    """The first five parameters of `packed`."""
    count, bits = matrix.outputs, matrix.bits
    shifts = torch.arange(0, 32, bits, device=matrix.words.device, dtype=torch.int32)
    words = _by_one(matrix.words, count).flatten(1)[:, : matrix.columns * bits // 32]
    by_block = words.view(count, -1, 1, bits)  # a block has as many words as codes have bits
    codes = by_block >> shifts[:, None] & (1 << bits) - 1  # [outputs, blocks, code, word]
    outer = _by_one(matrix.scale, count).unbind(2)
    inner = iter(() if matrix.inner is None else _by_one(matrix.inner, count).unbind(2))
    return (
        codes.to(torch.uint8).flatten(1),
        outer[0],
        outer[1] if matrix.has_minimum else None,
        next(inner) if matrix.has_sub_scale else None,
        next(inner) if matrix.has_sub_minimum else None,
    )


def _by_eight(rows: torch.Tensor) -> torch.Tensor:
    """[outputs, n, ...] -> [outputs / 8, n, 8, ...], up to a multiple of 16 outputs"""
    padding = rows.new_zeros(-len(rows) % 16, *rows.shape[1:])
    return torch.cat((rows, padding)).view(-1, 8, *rows.shape[1:]).transpose(1, 2).contiguous()


def _by_one(rows: torch.Tensor, count: int) -> torch.Tensor:
    """The inverse of `_by_eight`."""
    return rows.transpose(1, 2).flatten(0, 1)[:count]
