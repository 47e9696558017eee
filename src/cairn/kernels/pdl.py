"""Programmatic dependent launch (PDL): a kernel starts while the one before it drains.

A kernel compiled with PDL lets its successor start at once. It waits for its predecessor to
complete before it reads what the predecessor wrote. There are two exceptions. The copy of missing
pages lets its successor start only after its own wait. Attention that runs beside this copy reads a
page once a counter says that it has arrived, and waits at its end.

Every kernel waits, so completion is transitive. A kernel launched without PDL is a full barrier.
Data written before such a barrier may be read before the wait, but must bypass the L1 cache, which
may hold stale data. PDL hides the launch latency of small kernels; decoding one row launches
hundreds of them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


def pdl_options(x: torch.Tensor) -> dict[str, Any]:
    """Launch options for kernels with a PDL constant."""
    if is_hopper(x.device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether `device` is a Hopper GPU or a newer one."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
