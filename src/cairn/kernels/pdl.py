"""Programmatic dependent launch: a kernel starts while the one before it drains.

A kernel compiled with PDL lets its successor start at once (copies of missing pages: when they have
waited themselves) and waits, before it reads what its predecessor wrote, until that is complete;
attention beside such copies reads them as counters say that they are there, and waits at its end.
Every kernel waits, so completion is transitive; kernels without it are full barriers. What was
written before such a barrier may be read before the wait, past the L1 cache, which may hold what
was there earlier. PDL hides the launch of small kernels, of which decoding one row has hundreds.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


def pdl_options(x: torch.Tensor) -> dict[str, Any]:
    """Launch options for kernels with a PDL switch."""
    if is_hopper(x.device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@cache
def is_hopper(device: torch.device) -> bool:
    """Or what came after it."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
