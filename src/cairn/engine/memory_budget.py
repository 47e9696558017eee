"""Bytes that a rank may spend on its KV cache, on the device and on the host."""

from __future__ import annotations

from pathlib import Path

import torch

from cairn.config import EngineConfig
from cairn.engine.container_limit import memory_left
from cairn.engine.resolve import EngineChoices
from cairn.errors import ConfigError

GIB = 2**30
_DEFAULT_MEM_FRACTION = 0.85
_DEFAULT_FREE_SHARE = 0.25
_FALLBACK_MEMORY = 8 * GIB  # if the system does not report free memory


def default_budget(config: EngineConfig, device: torch.device) -> int:
    """Bytes that the KV cache of a rank may take by default."""
    return int(free_memory(device) / config.tp * _DEFAULT_FREE_SHARE)


def kv_budget(choices: EngineChoices) -> int | None:
    """Bytes for the KV cache of a rank; None to size it by what requests need. Buffers of kernels
    are beside it."""
    config, device, buffers = choices.config, choices.device, choices.buffer_bytes
    if config.kv_cache_gib is not None:
        wanted = int(config.kv_cache_gib * GIB)
        on_gpu = device.type == "cuda"
        free = torch.cuda.mem_get_info(device)[0] if on_gpu else free_memory(device) // config.tp
        if wanted + buffers > free:
            where = "on the device" if on_gpu else "for it, a container's limit included"
            raise ConfigError(
                f"kv_cache_gib is {config.kv_cache_gib:g} and {free / GIB:.1f} GiB of memory are "
                f"free {where}{told_beside(choices)}; lower it"
            )
        return wanted
    if device.type != "cuda":
        if config.mem_fraction_static is not None:
            raise ConfigError(
                f"mem_fraction_static is for CUDA and the device is {device.type}; use kv_cache_gib"
            )
        return None
    free, total = torch.cuda.mem_get_info(device)
    share = config.mem_fraction_static or _DEFAULT_MEM_FRACTION
    return max(0, int(free - total * (1 - share)) - buffers)


def told_beside(choices: EngineChoices) -> str:
    """What errors about memory say of buffers of kernels."""
    if not choices.buffer_bytes:
        return ""
    size = f"{choices.buffer_bytes / GIB:.3f} GiB"
    return f", and buffers of kernels take {size} beside the KV cache"


def free_memory(device: torch.device) -> int:
    """Bytes that this process may still allocate, including a container's limit."""
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory()
    free = _FALLBACK_MEMORY
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    left = memory_left()
    return free if left is None else min(free, left)
