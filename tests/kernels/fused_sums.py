"""Lets Triton's interpreter fuse a product with the sum it goes into, as a GPU does.

The product is then not rounded. Code that relies on `x * y - x * y` being 0 fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from triton.runtime.interpreter import InterpreterBuilder


def fuse_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = InterpreterBuilder.create_fmul

    def product(builder: Any, a: Any, b: Any) -> Any:
        result = multiply(builder, a, b)
        result.exact = a.data.astype(np.float64) * b.data.astype(np.float64)
        return result

    def fused(rounded: Callable[..., Any], sign: int) -> Callable[..., Any]:
        def add(builder: Any, a: Any, b: Any) -> Any:
            result = rounded(builder, a, b)
            if hasattr(a, "exact") or hasattr(b, "exact"):
                left, right = (getattr(x, "exact", x.data.astype(np.float64)) for x in (a, b))
                if hasattr(a, "exact") and hasattr(b, "exact"):
                    right = b.data.astype(np.float64)  # one of two products is rounded
                result.data = (left + sign * right).astype(result.data.dtype)
            return result

        return add

    monkeypatch.setattr(InterpreterBuilder, "create_fmul", product)
    for name, sign in (("create_fadd", 1), ("create_fsub", -1)):
        monkeypatch.setattr(
            InterpreterBuilder, name, fused(getattr(InterpreterBuilder, name), sign)
        )
