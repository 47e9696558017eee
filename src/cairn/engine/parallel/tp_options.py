"""`--tp`: what it cannot be combined with, and where each rank runs."""

from __future__ import annotations

import torch

from cairn.config import EngineConfig
from cairn.errors import ConfigError
from cairn.models.registry import read_spec
from cairn.models.source import ModelSource


def check_tp(config: EngineConfig, source: ModelSource, device: torch.device) -> None:
    """Refuse what several ranks cannot serve, before any of them is started."""
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"tp is {config.tp} and the device {device.type}; several ranks run on cuda or cpu: "
            "use tp=1, or device=cpu"
        )
    if device.type == "cuda" and config.tp > torch.cuda.device_count():
        raise ConfigError(
            f"tp is {config.tp} and torch sees {torch.cuda.device_count()} CUDA devices, of which "
            "each rank needs one; lower tp, show more devices with CUDA_VISIBLE_DEVICES, or use "
            "device=cpu"
        )
    for name, impossible, possible in (
        ("model_impl", "transformers", "cairn"),
        ("quantization", "int8", "none"),
    ):
        value = getattr(config, name)
        if value == impossible:
            raise ConfigError(
                f"tp is {config.tp} and {name} is {value!r}, which one rank alone can do; use "
                f"tp=1, or {name}={possible}"
            )
    read_spec(source.config, config.model_impl, tp=config.tp)


def rank_device(kind: str, rank: int) -> torch.device:
    return torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
