"""A kernel that no compiler takes. It is in a file of its own since another process imports it."""

from __future__ import annotations

import triton
import triton.language as tl

from cairn.kernels.launch import direct


@direct
@triton.jit
def broken_kernel(x, SIZE: tl.constexpr):
    tl.static_assert(SIZE > 1000, "as it should be")
    tl.store(x, 0)
