"""Decides whether matrices stay as their file has them, and finds the kernels for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cairn.config import EngineConfig
from cairn.errors import ConfigError
from cairn.kernels.cpu import CpuKernels, CpuKernelsUnavailableError

_FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class Quantization:
    keep: bool = False
    """Matrices stay as the file has them."""
    kernels: CpuKernels | None = None
    """What multiplies them; None for torch, and where there are none."""
    notes: tuple[str, ...] = ()


def resolve_quantization(
    config: EngineConfig, types: tuple[str, ...], dtype: torch.dtype, device: torch.device
) -> Quantization:
    """`types` are those of the file's matrices."""
    choice, refusal = config.quantization, None
    if device.type != "cpu" or dtype != torch.float32 or config.tp > 1:
        refusal = f"only a CPU in float32 on one rank keeps it; this is {device.type}, {dtype}"
        refusal += f", tp {config.tp}"
        types = tuple(name for name in types if name not in _FLOATS)  # those are just converted
    if choice in ("keep", "int8") and (refusal or config.model_impl == "transformers"):
        raise ConfigError(
            f"quantization={choice} is for Cairn's own models on a CPU in float32; the device is "
            f"{device.type}, dtype {dtype}, model_impl {config.model_impl}"
        )
    if choice == "none" or (choice == "auto" and not types):
        return Quantization()
    named = ", ".join(types)
    if refusal is not None:
        return Quantization(notes=(f"weights: {named} is dequantised; {refusal}",))
    try:
        kernels = CpuKernels.load()
    except CpuKernelsUnavailableError as error:
        if choice == "auto":
            note = f"weights: {named} in float32, multiplied by torch, because {error}"
            return Quantization(notes=(note,))
        return Quantization(choice == "keep", None, (f"products run in torch, slowly: {error}",))
    notes = () if choice == "int8" or named == "F32" else (f"weights: {named} as in the file",)
    return Quantization(choice != "int8", kernels, notes)
