"""Builds a model and fills it: every tensor must fit a slot, and every slot be filled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import torch

from cairn.errors import LoadError
from cairn.models.decoder import CausalLM
from cairn.models.layers import Embedding, Factory, Linear, named_slots
from cairn.models.parallel import Alone, Parallel
from cairn.models.quantize import QuantizationError
from cairn.models.spec import DecoderSpec
from cairn.models.split import rank_spec

Progress = Callable[[int, int], None]
"""progress(done, total) after each tensor."""

_DUMMY_STD = 0.02


def build_model(
    spec: DecoderSpec,
    dtype: torch.dtype,
    device: torch.device,
    parallel: Parallel | None = None,
) -> CausalLM:
    """All of the model, or what one of several ranks has of it."""
    fused = device.type == "cuda" and dtype != torch.float64 and find_spec("triton") is not None
    parallel = parallel or Alone()
    return CausalLM(rank_spec(spec, parallel.size), Factory(dtype, device, fused, parallel))


class WeightSource(Protocol):
    """Tensors by their checkpoint names: safetensors or GGUF."""

    @property
    def names(self) -> set[str]: ...

    def tensors(self) -> Iterator[tuple[Path, str, torch.Tensor]]:
        """(file, name, tensor), one at a time."""
        ...


def fill(
    model: CausalLM, weights: WeightSource, source: Path, progress: Progress | None = None
) -> None:
    """Stream weights into the model. `source` names them in errors."""
    slots = named_slots(model)
    # Buffers that old exports carry; they follow from the config.
    names = {name for name in weights.names if not name.endswith("rotary_emb.inv_freq")}
    tied = "lm_head.weight" if model.config.tie_embeddings else None
    missing = sorted(slots.keys() - names)
    if missing:
        raise LoadError(f"{source}: {_listed(missing)} missing from the checkpoint")
    unexpected = sorted(names - slots.keys() - {tied})
    if unexpected:
        raise LoadError(
            f"{source}: {_listed(unexpected)} not part of {model.config.architecture} as its "
            "config describes it"
        )
    tied_head: tuple[Path, torch.Tensor] | None = None
    for done, (path, name, tensor) in enumerate(weights.tensors(), start=1):
        if name == tied:
            tied_head = path, tensor
        elif name in slots:
            slot = slots[name]
            if tuple(tensor.shape) != slot.shape:
                raise LoadError(
                    f"{path}: tensor {name} has shape {list(tensor.shape)}, "
                    f"the config asks for {list(slot.shape)}"
                )
            if not tensor.is_floating_point():
                raise LoadError(
                    f"{path}: tensor {name} has type {tensor.dtype}; only float weights are read"
                )
            slot.write(tensor)
        if progress is not None:
            progress(done, len(weights.names))
    if tied_head is not None:
        _check_tied(model, *tied_head)


def fill_dummy(model: CausalLM, seed: int) -> None:
    """Random weights: matrices N(0, 0.02), norm weights 1, biases 0. They are drawn as a checkpoint
    would have them, so that they do not depend on how many ranks share the model."""
    weight = model.model.embed_tokens.weight
    for _, slot in sorted(named_slots(model).items()):
        tensor = weight.new_zeros(slot.shape)
        if slot.is_norm:
            tensor.fill_(1.0)
        elif tensor.dim() > 1:
            generator = torch.Generator(weight.device).manual_seed(seed)
            tensor.normal_(0.0, _DUMMY_STD, generator=generator)
            seed += 1
        slot.write(tensor)


def quantize(model: CausalLM) -> QuantizationError:
    """Turn all matrices to int8, one after the other, and measure what that changes."""
    lost = kept = 0.0
    errors: dict[str, float] = {}
    for name, module in model.named_modules():
        if isinstance(module, Linear | Embedding):
            dense, int8 = module.quantize()
            difference = (int8.dense() - dense).square().sum().item()
            size = dense.float().square().sum().item()
            lost, kept = lost + difference, kept + size
            errors[name] = (difference / size) ** 0.5 if size else 0.0
    worst = max(errors, key=lambda name: errors[name])
    return QuantizationError((lost / kept) ** 0.5 if kept else 0.0, errors[worst], worst)


def _check_tied(model: CausalLM, path: Path, tensor: torch.Tensor) -> None:
    """A tied head in the file is redundant; a different one means the config is wrong."""
    if not model.model.embed_tokens.agrees_with(tensor):
        raise LoadError(
            f"{path}: tensor lm_head.weight differs from the embedding although "
            "tie_word_embeddings is true; set it to false in config.json"
        )


def _listed(names: list[str]) -> str:
    if len(names) == 1:
        return f"tensor {names[0]} is"
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"tensors {', '.join(names[:5])}{more} are"
