"""What every rank's memory looks like: decided once, by rank 0, so that all of them agree."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cairn.config import EngineConfig
from cairn.engine.scheduler import Limits
from cairn.engine.tier_sizes import TierSizes
from cairn.memory.geometry import PageGeometry
from cairn.memory.groups import LayerGroup


@dataclass(frozen=True, slots=True)
class Layout:
    config: EngineConfig
    """With what one option implies for others."""
    dtype: torch.dtype
    limits: Limits
    context: int
    geometry: PageGeometry
    groups: tuple[LayerGroup, ...]
    num_pages: tuple[int, ...]  # by group
    max_pages: int
    """Of a request's page table."""
    tier: TierSizes | None
