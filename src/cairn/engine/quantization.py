"""Decides whether matrices stay as their file has them, and finds the kernels for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from cairn.config import EngineConfig
from cairn.errors import ConfigError
from cairn.kernels.cpu import CpuKernels, CpuKernelsUnavailableError
from cairn.models.interface import LanguageModel
from cairn.models.layers import Linear
from cairn.models.loader import use_kernels
from cairn.models.quantize import ROUNDINGS

_FLOATS = ("F32", "F16", "BF16")
FP8_CAPABILITY = (8, 9)  # of GPUs that have FP8 numbers


@dataclass(frozen=True, slots=True)
class Quantization:
    keep: bool = False
    """Matrices stay as the file has them."""
    kernels: CpuKernels | None = None
    """What multiplies them on a CPU; None for torch, and where there are none."""
    notes: tuple[str, ...] = ()


def resolve_quantization(
    config: EngineConfig, types: tuple[str, ...], dtype: torch.dtype, device: torch.device
) -> Quantization:
    """`types` are those of the file's matrices."""
    choice = config.quantization
    refusal = _refusal(config, types, dtype, device)
    if choice not in ("auto", "none") and refusal is not None:
        raise ConfigError(f"quantization={choice} is not possible here: {refusal}; use none")
    if device.type != "cpu" or refusal is not None:
        types = tuple(name for name in types if name not in _FLOATS)  # those are just converted
    if choice == "keep" and not types:
        raise ConfigError(
            "quantization=keep has nothing to keep: the file has float weights; use auto, or round "
            f"them: {', '.join(ROUNDINGS)}"
        )
    if choice == "none" or (choice == "auto" and not types):
        return Quantization()
    named = ", ".join(types)
    if refusal is not None:
        return Quantization(notes=(f"weights: {named} is dequantised; {refusal}",))
    if device.type == "cuda" and choice == "auto" and any(name != "FP8" for name in types):
        slow = _few_rows_refusal(choice, types, device)
        if slow is not None:
            note = f"weights: {named} is dequantised; quantization=keep needs less memory and is"
            return Quantization(notes=(f"{note} slower for several requests at once; {slow}",))
    keep = choice not in ROUNDINGS
    experts = ""
    if device.type == "cuda" and any(name != "FP8" for name in types):
        experts = "; experts, if there are any, are dequantised"
    notes: tuple[str, ...] = ()
    if keep and named != "F32":
        notes = (f"weights: {named} as in the file{experts}",)
    if device.type == "cuda":
        slow = _few_rows_refusal(choice, types, device)
        if slow is not None:
            note = "weights: Triton multiplies few rows with quantised matrices, more slowly"
            notes = *notes, f"{note}; {slow}"
        if choice == "fp8" or (keep and "FP8" in types):
            notes = *notes, *_many_rows_note(dtype, device)
        return Quantization(keep, notes=notes)
    try:
        return Quantization(keep, CpuKernels.load(), notes)
    except CpuKernelsUnavailableError as error:
        if choice == "auto":
            note = f"weights: {named} in float32, multiplied by torch, because {error}"
            return Quantization(notes=(note,))
        return Quantization(keep, None, (f"products run in torch, slowly: {error}",))


def width_notes(model: LanguageModel) -> Iterator[str]:
    """Which quantised matrices have widths that only Triton's kernels multiply."""
    linears = [own for _, own in model.named_modules() if isinstance(own, Linear)]
    slow = sum(own.is_slow for own in linears)
    if slow:
        yield (
            f"weights: Triton multiplies few rows with {slow} of {len(linears)} matrices, more "
            "slowly; faster kernels need columns in multiples of 128 (4 bits) or 64 (8 bits)"
        )


def _few_rows_refusal(choice: str, types: tuple[str, ...], device: torch.device) -> str | None:
    """Why few rows are multiplied by Triton's kernels; None if there are faster ones."""
    from cairn.kernels import code_rows, few_rows

    rounded = choice in ROUNDINGS
    is_fp8 = choice == "fp8" if rounded else "FP8" in types
    # Rounded to FP8, embedding and output head are codes.
    has_codes = rounded or any(name != "FP8" for name in types)
    reason = few_rows.refusal(device) if is_fp8 else None
    return code_rows.refusal(device) if reason is None and has_codes else reason


def _many_rows_note(dtype: torch.dtype, device: torch.device) -> Iterator[str]:
    """On a Hopper GPU in bfloat16, for which torch has the fastest products."""
    from cairn.kernels import fp8_many

    if dtype == torch.bfloat16 and torch.cuda.get_device_capability(device)[0] == 9:
        reason = fp8_many.torch_refusal(device)
        if reason is not None:
            yield f"weights: slower products of many rows with FP8 matrices; torch's fail: {reason}"


def _refusal(
    config: EngineConfig, types: tuple[str, ...], dtype: torch.dtype, device: torch.device
) -> str | None:
    """Why no matrix can be quantised here, whether in the file or at load; or None."""
    short = str(dtype).removeprefix("torch.")
    if config.model_impl == "transformers":
        return "model_impl is transformers"
    if device.type == "cuda":
        if dtype not in (torch.bfloat16, torch.float16):
            return f"kernels on CUDA take bfloat16 and float16; this is {short}"
        if not use_kernels(dtype, device):
            return "triton is not installed"
        if "INT8" in types and config.quantization in ("auto", "keep"):
            return "kernels on CUDA do not read int8 weights"
        capability = torch.cuda.get_device_capability(device)
        is_fp8 = "FP8" in types if config.quantization in ("auto", "keep") else None
        if (is_fp8 or config.quantization == "fp8") and capability < FP8_CAPABILITY:
            major, minor = capability
            return f"FP8 needs compute capability 8.9; this GPU has {major}.{minor}"
        return None
    if device.type != "cpu" or dtype != torch.float32 or config.tp > 1:
        return (
            "only CUDA, and a CPU in float32 on one rank, have kernels for it; this is "
            f"{device.type}, {short}, tp {config.tp}"
        )
    return None
