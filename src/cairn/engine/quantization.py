"""Decides whether quantised matrices of a file stay quantised, and finds the kernels for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cairn.config import EngineConfig
from cairn.errors import ConfigError
from cairn.kernels.cpu import CpuKernels, CpuKernelsUnavailableError
from cairn.models.packed_int4 import METHODS, quantization_method
from cairn.models.source import ModelSource


@dataclass(frozen=True, slots=True)
class Quantization:
    keep: bool = False
    """Matrices that are quantised in the file stay so."""
    kernels: CpuKernels | None = None
    """What multiplies quantised matrices; None for torch, and where there are none."""
    notes: tuple[str, ...] = ()


def resolve_quantization(
    config: EngineConfig, source: ModelSource, dtype: torch.dtype, device: torch.device
) -> Quantization:
    choice, types = config.quantization, _types(source)
    if config.load_format == "dummy":
        types = ()
    refusal = None
    if device.type != "cpu" or dtype != torch.float32 or config.tp > 1:
        refusal = f"only a CPU in float32 on one rank keeps it; this is {device.type}, {dtype}"
        refusal += f", tp {config.tp}"
    if choice in ("keep", "int8") and (refusal or config.model_impl == "transformers"):
        raise ConfigError(
            f"quantization={choice} is for Cairn's own models on a CPU in float32; the device is "
            f"{device.type}, dtype {dtype}, model_impl {config.model_impl}"
        )
    if choice == "keep" and not types:
        raise ConfigError(
            f"quantization=keep has nothing to keep: {source.config.source} has float weights; use "
            "auto or int8"
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
            note = f"weights: {named} is dequantised, because {error}; keep would be slow"
            return Quantization(notes=(note,))
        return Quantization(choice == "keep", None, (f"products run in torch, slowly: {error}",))
    notes = () if choice == "int8" else (f"weights: {named} as in the file",)
    return Quantization(choice != "int8", kernels, notes)


def _types(source: ModelSource) -> tuple[str, ...]:
    """Types of the matrices that are quantised in the file and can stay so."""
    if source.gguf is not None:
        return source.gguf.quantized_types()
    method = quantization_method(source.config)
    return (method.upper(),) if method in METHODS else ()
