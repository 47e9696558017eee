"""Checkpoints with weights of 8 bits: FP8 (e4m3), as DeepSeek, compressed-tensors and ModelOpt
write them, or int8, as compressed-tensors does.

Beside `name.weight` is `name.weight_scale_inv` or `name.weight_scale`: one scale for each block
(128 x 128 as a rule, of which those at the lower and right edge may be partial), for each output,
or for the whole matrix. A weight is number * scale. Scales of inputs (`name.input_scale`) are not
needed: inputs are rounded by their own largest value, or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cairn.errors import ConfigError, LoadError
from cairn.models.blocks import Weight
from cairn.models.checkpoint import Checkpoint
from cairn.models.config_reader import ConfigReader, shown
from cairn.models.narrow import Narrow

FP8_METHODS = ("fp8", "compressed-tensors", "modelopt")
_SCALES = ("weight_scale_inv", "weight_scale")
_INPUT_SCALE = ".input_scale"
_FP8 = {"fmt": ("e4m3",), "activation_scheme": ("dynamic", "static")}
_COMPRESSED = {"format": ("float-quantized", "int-quantized")}
_OF_WEIGHTS = {"num_bits": (8,), "strategy": ("tensor", "channel", "block"), "symmetric": (True,)}
_MODELOPT = {"quant_algo": ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")}


@dataclass(frozen=True, slots=True)
class Fp8Format:
    block_size: tuple[int, int] | None
    """Rows and columns of a block; None if outputs or whole matrices have a scale."""
    dtype: torch.dtype = torch.float8_e4m3fn


def read_fp8_format(config: ConfigReader) -> Fp8Format:
    """What `quantization_config` says, where its quant_method is one of FP8_METHODS."""
    given = config.take("quantization_config", dict)
    method = given["quant_method"]
    name = "quantization_config"
    if method == "modelopt":
        _check(config, name, given, _MODELOPT)
        return Fp8Format(None)
    if method == "fp8":
        _check(config, name, given, _FP8)
        size = given.get("weight_block_size")
        return Fp8Format(None if size is None else _block_size(config, given, size))
    _check(config, name, given, _COMPRESSED)
    whole = given.get("format") == "int-quantized"
    kinds = {**_OF_WEIGHTS, "type": ("int" if whole else "float",)}
    sizes = set()
    groups = given.get("config_groups")
    for key, group in groups.items() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            raise ConfigError(f"{config.source}: {name}.config_groups.{key} has no weights")
        _check(config, f"{name}.config_groups.{key}.weights", weights, kinds)
        size = weights.get("block_structure") if weights.get("strategy") == "block" else None
        sizes.add(None if size is None else _block_size(config, given, size))
    if len(sizes) != 1:
        raise ConfigError(
            f"{config.source}: {name}.config_groups is {shown(groups)}; supported: groups of "
            "weights with one strategy"
        )
    return Fp8Format(sizes.pop(), torch.int8 if whole else torch.float8_e4m3fn)


def _check(
    config: ConfigReader,
    where: str,
    given: Mapping[str, Any],
    supported: Mapping[str, tuple[object, ...]],
) -> None:
    for name, values in supported.items():
        value = given.get(name, values[0])
        if value not in values:
            listed = ", ".join(map(str, values))
            raise config.unsupported(f"{where}.{name}", value, f"supported: {listed}")


def _block_size(config: ConfigReader, given: object, size: object) -> tuple[int, int]:
    if isinstance(size, list) and len(size) == 2:
        rows, columns = size
        if type(rows) is int and type(columns) is int and rows > 0 and columns > 0:
            return rows, columns
    raise ConfigError(
        f"{config.source}: quantization_config is {shown(given)}; a block size is [rows, columns]"
    )


@dataclass(frozen=True, slots=True)
class Fp8Weights:
    """A checkpoint's tensors, with matrices of 8 bits and their scales as `Narrow`."""

    source: Checkpoint
    format: Fp8Format

    @property
    def path(self) -> Path:
        return self.source.path

    @property
    def types(self) -> tuple[str, ...]:
        return ("INT8" if self.format.dtype == torch.int8 else "FP8",)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            name: shape
            for name, shape in self.source.shapes.items()
            if _weight_of(name) == name and not name.endswith(_INPUT_SCALE)
        }

    def tensors(self) -> Iterator[tuple[Path, str, Weight]]:
        scaled = {_weight_of(name) for name in self.source.shapes if _weight_of(name) != name}
        if not scaled:
            raise LoadError(
                f"{self.path}: quantization_config says that weights are {self.types[0]}, but none "
                "has scales"
            )
        waiting: dict[str, torch.Tensor] = {}  # weights without their scales, and the reverse
        for path, name, tensor in self.source.tensors():
            weight = _weight_of(name)
            if name.endswith(_INPUT_SCALE):
                continue
            if weight not in scaled:
                yield path, name, tensor
            elif weight not in waiting:
                waiting[weight] = tensor
            else:
                other = waiting.pop(weight)
                pair = (tensor, other) if name == weight else (other, tensor)
                yield path, weight, self._matrix(path, weight, *pair)
        for name in waiting:
            raise LoadError(f"{self.path}: {name} or its scale is missing from the checkpoint")

    def _matrix(self, path: Path, name: str, weight: torch.Tensor, scale: torch.Tensor) -> Weight:
        if weight.dim() != 2 or weight.dtype != self.format.dtype:
            expected = str(self.format.dtype).removeprefix("torch.")
            raise LoadError(
                f"{path}: tensor {name} has type {weight.dtype} and {weight.dim()} dimensions; "
                f"weights with scales are matrices of {expected} here"
            )
        outputs, columns = weight.shape
        scale = scale.float()
        if self.format.block_size is None:
            if scale.numel() not in (1, outputs):
                raise LoadError(
                    f"{path}: tensor {name} of shape {[outputs, columns]} has scales of shape "
                    f"{list(scale.shape)}; there must be one, or one for each output"
                )
            return _kept(weight, scale.reshape(-1, 1).expand(outputs, 1).contiguous(), columns)
        rows, width = self.format.block_size
        blocks = [-(-outputs // rows), -(-columns // width)]
        if list(scale.shape) != blocks:
            raise LoadError(
                f"{path}: tensor {name} of shape {[outputs, columns]} has scales of shape "
                f"{list(scale.shape)}; blocks of {rows} x {width} need {blocks}"
            )
        wide = scale.repeat_interleave(min(rows, outputs), 0)[:outputs]
        return _kept(weight, wide.contiguous(), min(width, columns))


def _kept(numbers: torch.Tensor, scale: torch.Tensor, span: int) -> Weight:
    matrix = Narrow(numbers, scale, span)
    # The kernel for a CPU takes the bits of NaN for a number.
    return matrix.dense() if bool(numbers.float().isnan().any()) else matrix


def _weight_of(name: str) -> str:
    """The weight to which a tensor belongs: itself, or the weight whose scale it is."""
    stem, _, last = name.rpartition(".")
    return f"{stem}.weight" if last in _SCALES else name
