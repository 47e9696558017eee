"""The kernel that rotates and stores latent rows and index keys, against torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from cairn.kernels.interface import Normed
from cairn.kernels.rope_latent import rope_latent
from cairn.models.rope import rotate


def check(
    rows: int,
    heads: int,
    nope: int,
    rope: int,
    width: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    keys: bool,
) -> None:
    """`keys`: of an index, whose heads are rotated in their first columns."""
    torch.manual_seed(rows)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device=device)

    query, projected = draw(rows, heads, nope + rope), draw(rows, 3 + width + rope)
    row, key = projected[:, 3 : 3 + width], projected[:, 3 + width :]
    cos, sin, weight, bias = draw(rows, 1, rope), draw(rows, 1, rope), draw(width), draw(width)
    kept = width if keys else width + rope
    pool, expected = (torch.full((4, 8, kept), 7.0, dtype=dtype, device=device) for _ in range(2))
    place = torch.randperm(24, device=device)[:rows] + 8
    pages, offsets = (place // 8).int(), place % 8
    first = 0 if keys else nope
    wide, angles = query.float(), (cos.float(), sin.float())
    turned = rotate(wide[..., first : first + rope], *angles)
    wanted = torch.cat((wide[..., :first], turned, wide[..., first + rope :]), -1)
    if keys:
        normed = F.layer_norm(row.float(), (width,), weight.float(), bias.float(), 1e-2)
        turned = rotate(normed[:, None, :rope], *angles)[:, 0]
        stored = torch.cat((turned, normed[:, rope:]), -1)
        given = Normed(row, weight, 1e-2, bias=bias)
    else:
        normed = F.rms_norm(row.float(), (width,), weight.float(), 1e-2)
        stored = torch.cat((normed, rotate(key.float()[:, None], *angles)[:, 0]), -1)
        given = Normed(row, weight, 1e-2, key)
    expected[pages.long(), offsets] = stored.to(dtype)
    rope_latent(query, first, (cos, sin), given, pool, pages, offsets)
    tolerance = 2e-2 if dtype.itemsize == 2 else 1e-5
    torch.testing.assert_close(query.float(), wanted, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(pool, expected, rtol=tolerance, atol=tolerance)
