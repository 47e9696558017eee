"""Whether an answer is right, and the confidence interval of a share of right answers."""

from __future__ import annotations

import math
import re

from cairn.eval.wording import UNKNOWN

_NUMBER = re.compile(r"\d{1,3}(?:,\d{3})+(?!\d)|\d+")
_Z95 = 1.959963984540054


def is_right(said: str, answer: str) -> bool:
    """Whether the first number in `said` equals the answer, digit for digit. If the answer is
    `unknown`, `said` must say so and contain no number."""
    number = _NUMBER.search(said)
    if answer == UNKNOWN:
        return number is None and UNKNOWN in said.lower()
    return number is not None and number.group().replace(",", "") == answer


def wilson(right: int, asked: int, z: float = _Z95) -> tuple[float, float]:
    """Wilson's 95 % interval of a share. It is also valid for few questions and near 0 and 1."""
    if asked == 0:
        return 0.0, 1.0
    share = right / asked
    spread = z * z / asked
    middle = share + spread / 2
    half = z * math.sqrt(share * (1 - share) / asked + spread / (4 * asked))
    # At 0 and 1 the bound is exact; rounding must not move it.
    low = 0.0 if right == 0 else (middle - half) / (1 + spread)
    high = 1.0 if right == asked else (middle + half) / (1 + spread)
    return low, high
