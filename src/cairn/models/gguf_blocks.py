"""Reads the quantised types of GGUF files as `Codes`.

Types named _0, _1 and IQ4_NL have blocks of 32 weights. The others have blocks of 256 with two
levels of scales. All functions take bytes [outputs, blocks, size of a block].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from cairn.models.blocks import Codes

_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def read_blocks(kind: str, data: torch.Tensor, block_bytes: int) -> Codes:
    """The matrix in bytes [outputs, bytes of a row] of a type in `BLOCK_TYPES`."""
    return BLOCK_TYPES[kind](torch.unflatten(data, 1, (-1, block_bytes)))


def _half(data: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 at byte `at` of each block."""
    return data[..., at : at + 2].contiguous().view(torch.float16)[..., 0]


def _nibbles(data: torch.Tensor) -> torch.Tensor:
    """[..., n] -> [..., 2 * n]: all low halves, then all high halves."""
    return torch.cat((data & 15, data >> 4), -1)


def _bits(data: torch.Tensor, width: int, count: int) -> torch.Tensor:
    """[..., n] -> [..., count, n]: the lowest `width` bits, then the next ones, and so on."""
    shifts = torch.arange(0, width * count, width, dtype=torch.uint8)
    return data[..., None, :] >> shifts[:, None] & (1 << width) - 1


def _in_order(codes: torch.Tensor) -> torch.Tensor:
    """[outputs, blocks, ...] -> [outputs, columns]"""
    return codes.flatten(1)


def _fifth_bit(data: torch.Tensor) -> torch.Tensor:
    """Four bytes with one bit for each of 32 codes -> 16 where it is set."""
    return (_bits(data, 1, 8).transpose(-1, -2).flatten(-2)) << 4


def _signed(values: torch.Tensor, offset: int) -> torch.Tensor:
    return (values.to(torch.int16) - offset).to(torch.int8)


def _subs(values: torch.Tensor, per_block: int = 1) -> torch.Tensor:
    """Scales [outputs, blocks of 256, n] -> [outputs, blocks of 32, subs]"""
    return torch.unflatten(values.flatten(1), 1, (-1, per_block)).to(torch.int8)


def _q4_0(data: torch.Tensor) -> Codes:
    return Codes(_in_order(_nibbles(data[..., 2:])), _half(data, 0), offset=8)


def _q4_1(data: torch.Tensor) -> Codes:
    return Codes(_in_order(_nibbles(data[..., 4:])), _half(data, 0), _half(data, 2))


def _q5_0(data: torch.Tensor) -> Codes:
    codes = _nibbles(data[..., 6:]) | _fifth_bit(data[..., 2:6])
    return Codes(_in_order(codes), _half(data, 0), offset=16, bits=8)


def _q5_1(data: torch.Tensor) -> Codes:
    codes = _nibbles(data[..., 8:]) | _fifth_bit(data[..., 4:8])
    return Codes(_in_order(codes), _half(data, 0), _half(data, 2), bits=8)


def _q8_0(data: torch.Tensor) -> Codes:
    # Signed bytes: with the highest bit flipped they are 128 more.
    return Codes(_in_order(data[..., 2:] ^ 128), _half(data, 0), offset=128, bits=8)


def _iq4_nl(data: torch.Tensor) -> Codes:
    return Codes(_in_order(_iq4(data[..., 2:])), _half(data, 0), offset=128, bits=8)


def _iq4(data: torch.Tensor) -> torch.Tensor:
    values = torch.tensor(_IQ4_VALUES, dtype=torch.int16) + 128
    return values.to(torch.uint8)[_nibbles(data).int()]


def _iq4_xs(data: torch.Tensor) -> Codes:
    low = _bits(data[..., 4:8], 4, 2).transpose(-1, -2).flatten(-2)
    high = _bits(data[..., 2:4], 2, 4).transpose(-1, -2).flatten(-2)
    codes = _iq4(torch.unflatten(data[..., 8:], -1, (8, 16)))
    scale = _subs(_signed(low | high << 4, 32))
    return Codes(_in_order(codes), _half(data, 0), None, scale, offset=128, bits=8)


def _q2_k(data: torch.Tensor) -> Codes:
    codes = _bits(torch.unflatten(data[..., 16:80], -1, (2, 32)), 2, 4)
    scale, minimum = (_subs(part, 2) for part in (data[..., :16] & 15, data[..., :16] >> 4))
    return Codes(_in_order(codes), _half(data, 80), -_half(data, 82), scale, minimum)


def _q3_k(data: torch.Tensor) -> Codes:
    low = _bits(torch.unflatten(data[..., 32:96], -1, (2, 32)), 2, 4).flatten(-3, -2)
    codes = low | _bits(data[..., :32], 1, 8) << 2
    scale = _nibbles(data[..., 96:104]) | _bits(data[..., 104:108], 2, 4).flatten(-2) << 4
    scale = _subs(_signed(scale, 32), 2)
    return Codes(_in_order(codes), _half(data, 108), None, scale, offset=4)


def _six_bit_scales(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Twelve bytes -> eight scales and eight minima."""
    first, second, last = data[..., :4], data[..., 4:8], data[..., 8:]
    scale = torch.cat((first & 63, last & 15 | first >> 2 & 48), -1)
    minimum = torch.cat((second & 63, last >> 4 | second >> 2 & 48), -1)
    return _subs(scale), _subs(minimum)


def _q4_k(data: torch.Tensor) -> Codes:
    scale, minimum = _six_bit_scales(data[..., 4:16])
    codes = _nibbles(torch.unflatten(data[..., 16:], -1, (4, 32)))
    return Codes(_in_order(codes), _half(data, 0), -_half(data, 2), scale, minimum)


def _q5_k(data: torch.Tensor) -> Codes:
    scale, minimum = _six_bit_scales(data[..., 4:16])
    high = _bits(data[..., 16:48], 1, 8).flatten(-2) << 4
    codes = _nibbles(torch.unflatten(data[..., 48:], -1, (4, 32))).flatten(-2) | high
    return Codes(_in_order(codes), _half(data, 0), -_half(data, 2), scale, minimum, bits=8)


def _q6_k(data: torch.Tensor) -> Codes:
    low = _nibbles(torch.unflatten(data[..., :128], -1, (2, 64)))  # [..., 2, 128]
    high = _bits(torch.unflatten(data[..., 128:192], -1, (2, 32)), 2, 4).flatten(-2) << 4
    scale = _subs(data[..., 192:208].view(torch.int8), 2)
    codes = _in_order(low | high)
    return Codes(codes, _half(data, 208), None, scale, offset=32, bits=8)


BLOCK_TYPES: Mapping[str, Callable[[torch.Tensor], Codes]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
