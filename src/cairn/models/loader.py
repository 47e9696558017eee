"""Builds a model and fills it: every tensor must fit a slot, and every slot be filled."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import torch

from cairn.errors import ConfigError, LoadError
from cairn.kernels.cpu import CpuKernels
from cairn.models.blocks import Weight, dense
from cairn.models.config_reader import ConfigReader
from cairn.models.experts import ExpertWeights
from cairn.models.interface import LanguageModel
from cairn.models.layers import Embedding, Linear, named_slots
from cairn.models.module import Factory, Module, TensorSlot
from cairn.models.narrow import Narrow
from cairn.models.parallel import Alone, Parallel
from cairn.models.quantize import EMBEDDINGS, QuantizationError, Rounding
from cairn.models.registry import build

Progress = Callable[[int, int], None]
"""progress(done, total) after each tensor."""

_DUMMY_STD = 0.02
_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def build_model(
    config: ConfigReader,
    dtype: torch.dtype,
    device: torch.device,
    parallel: Parallel | None = None,
    impl: str = "cairn",
    keep: bool = False,
    cpu: CpuKernels | None = None,
) -> LanguageModel:
    """The model that config.json describes, without its weights, or a rank's part of it."""
    factory = Factory(dtype, device, use_kernels(dtype, device), parallel or Alone(), keep, cpu)
    return build(config, factory, impl)


def use_kernels(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether Triton's kernels compute what lies between matrix products."""
    return device.type == "cuda" and dtype != torch.float64 and find_spec("triton") is not None


class WeightSource(Protocol):
    """Weights by their checkpoint names: safetensors or GGUF."""

    @property
    def path(self) -> Path:
        """The file, or the folder of several."""
        ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    @property
    def types(self) -> tuple[str, ...]:
        """Names of the types of its matrices."""
        ...

    def tensors(self) -> Iterator[tuple[Path, str, Weight]]:
        """(file, name, weight), one at a time."""
        ...


def check_weights(config: ConfigReader, weights: WeightSource) -> None:
    """Refuse weights that are not what the config describes, before they take any memory."""
    layers = config.peek("num_hidden_layers")
    if isinstance(layers, int) and layers > len(weights.shapes):
        raise config.unsupported(
            "num_hidden_layers", layers, f"{weights.path} has {len(weights.shapes)} tensors"
        )
    sketch = build_model(config, torch.float32, torch.device("meta"))
    _check_shapes(sketch, weights)


def fill(model: LanguageModel, weights: WeightSource, progress: Progress | None = None) -> None:
    """Stream weights into the model."""
    _check_shapes(model, weights)

    def counted() -> Iterator[tuple[Path, str, Weight]]:
        for done, found in enumerate(weights.tensors(), start=1):
            yield found
            if progress is not None:
                progress(done, len(weights.shapes))

    write_tensors(model, counted(), weights.path)


def write_tensors(
    model: LanguageModel,
    tensors: Iterable[tuple[Path | str, str, Weight]],
    source: Path | str,
) -> None:
    """Write (file, name, tensor) to the model, which must need all of them and no others."""
    slots = _all_slots(model)
    copies: list[tuple[Path | str, str, Weight]] = []
    names = set()
    for path, name, tensor in tensors:
        names.add(name)
        if name in model.tied:
            copies.append((path, name, tensor))
        elif name in slots:
            slot = slots[name]
            _check_shape(path, name, tuple(tensor.shape), slot.shape)
            if isinstance(tensor, torch.Tensor) and tensor.dtype not in _TYPES:
                raise LoadError(
                    f"{path}: tensor {name} has type {tensor.dtype} and no scales; only float "
                    "weights are read without"
                )
            _fill_slot(slot, tensor)
    _check_names(model, names, source)
    for path, name, tensor in copies:
        # A copy in the file is redundant; a different one means the config is wrong.
        if not model.tied[name].agrees_with(dense(tensor)):
            raise LoadError(
                f"{path}: tensor {name} differs from the embedding although "
                "tie_word_embeddings is true; set it to false in config.json"
            )


def _fill_slot(slot: TensorSlot, weight: Weight) -> None:
    if slot.keep is None:
        slot.write(dense(weight))
    else:
        slot.keep(Narrow.of(weight) if isinstance(weight, torch.Tensor) else weight)


def _check_shapes(model: LanguageModel, weights: WeightSource) -> None:
    _check_names(model, weights.shapes, weights.path)
    for name, slot in _all_slots(model).items():
        if name in weights.shapes:
            _check_shape(weights.path, name, weights.shapes[name], slot.shape)


def _check_shape(
    path: Path | str, name: str, shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    if shape != expected and (expected or shape != (1,)):  # numbers may be vectors of one
        raise LoadError(
            f"{path}: tensor {name} has shape {list(shape)}, the config asks for {list(expected)}"
        )


def _check_names(model: LanguageModel, names: Collection[str], source: Path | str) -> None:
    slots, given = named_slots(model).keys(), set(names)
    joint = {name: apart for name, _, apart in _joint_slots(model) if name in given}
    filled = given.union(*joint.values())
    missing = sorted(slots - filled)
    if missing:
        raise LoadError(f"{source}: {_listed(missing)} missing from the checkpoint")
    known = slots | joint.keys() | model.tied.keys()
    unexpected = sorted(name for name in given - known if not model.ignores(name))
    if unexpected:
        raise LoadError(
            f"{source}: {_listed(unexpected)} not part of {model.spec.architecture} as its "
            "config describes it"
        )


def _all_slots(model: LanguageModel) -> dict[str, TensorSlot]:
    return {**named_slots(model), **{name: slot for name, slot, _ in _joint_slots(model)}}


def _joint_slots(model: LanguageModel) -> list[tuple[str, TensorSlot, tuple[str, ...]]]:
    return [slot for name, module in model.named_modules() for slot in module.joint_slots(name)]


def fill_dummy(model: LanguageModel, seed: int, rounded: Rounding | None = None) -> None:
    """Random weights: matrices N(0, 0.02), norm weights 1, biases 0. They are drawn as a checkpoint
    would have them, so that they do not depend on how many ranks share the model.

    `rounded`: draw matrices as `quantize` would make them, for kernels on one GPU. That takes a
    fraction of the time, and other numbers come out."""
    some = next(tensor for _, tensor in model.named_tensors())
    drawn: set[str] = set()
    if rounded is not None:
        generator = torch.Generator(some.device).manual_seed(seed)
        for name, module, own in _to_round(model, rounded):
            if module.draw(own, _DUMMY_STD, generator):
                drawn.update(path for path, slot in module.slots(name) if len(slot.shape) > 1)
        if not drawn:
            raise _nothing_to_round(rounded)
    for name, slot in sorted(named_slots(model).items()):
        if name in drawn:
            continue
        tensor = some.new_zeros(slot.shape)
        if slot.is_norm:
            tensor.fill_(1.0)
        elif tensor.dim() > 1:
            generator = torch.Generator(some.device).manual_seed(seed)
            tensor.normal_(0.0, _DUMMY_STD, generator=generator)
            seed += 1
        _fill_slot(slot, tensor)


def _nothing_to_round(rounding: Rounding) -> ConfigError:
    return ConfigError(
        f"quantization={rounding.name} has nothing to round: no matrix is a multiple of "
        f"{rounding.columns} wide"
    )


def quantize(model: LanguageModel, rounding: Rounding, *, ends: bool = True) -> QuantizationError:
    """Round matrices, one after the other, and measure what that changes. Without `ends` embedding
    and output head stay as they are."""
    lost = kept = 0.0
    errors: dict[str, float] = {}
    rounded_ends = False
    for name, module, own in _to_round(model, rounding):
        if not ends and _is_end(name, module):
            continue
        difference = size = 0.0
        for before, after in module.quantize(own):
            difference += (after - before).square().sum().item()
            size += before.float().square().sum().item()
            rounded_ends |= _is_end(name, module)
        lost, kept = lost + difference, kept + size
        errors[name] = (difference / size) ** 0.5 if size else 0.0
    if not kept:
        raise _nothing_to_round(rounding)
    worst = max(errors, key=lambda name: errors[name])
    form = EMBEDDINGS.name if rounded_ends else "not rounded"
    return QuantizationError(rounding.name, form, (lost / kept) ** 0.5, errors[worst], worst)


def _to_round(
    model: LanguageModel, rounding: Rounding
) -> Iterator[tuple[str, Linear | Embedding | ExpertWeights, Rounding]]:
    """Matrices, and how each is rounded."""
    for name, module in model.named_modules():
        if isinstance(module, Linear | Embedding | ExpertWeights):
            yield name, module, EMBEDDINGS if _is_end(name, module) else rounding


def _is_end(name: str, module: Module) -> bool:
    """Whether this is the embedding or the output head."""
    return name == "lm_head" or isinstance(module, Embedding)


def _listed(names: list[str]) -> str:
    if len(names) == 1:
        return f"tensor {names[0]} is"
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"tensors {', '.join(names[:5])}{more} are"
