"""Checkpoints with FP8 weights: e4m3 numbers and a scale for each block, 128 x 128 as a rule.

`name.weight` has `name.weight_scale_inv` beside it, one float32 per block. Blocks at the lower and
right edge may be partial. A weight is number * scale, computed in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from cairn.errors import ConfigError, LoadError
from cairn.models.blocks import Weight
from cairn.models.checkpoint import Checkpoint
from cairn.models.config_reader import ConfigReader, shown
from cairn.models.narrow import Narrow

_SCALE = "_scale_inv"
_FORMAT = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}


def read_block_size(config: ConfigReader) -> tuple[int, int] | None:
    """Rows and columns of a block, from `quantization_config`; None if weights are not FP8."""
    given = config.take_optional("quantization_config", dict)
    if given is None:
        return None
    for name, value in _FORMAT.items():
        if given.get(name, value) != value:
            raise config.unsupported(
                f"quantization_config.{name}", given[name], f"supported: {value}"
            )
    size = given.get("weight_block_size")
    positive = isinstance(size, list) and all(type(side) is int and side > 0 for side in size)
    if "quant_method" not in given or not isinstance(size, list) or not positive or len(size) != 2:
        raise ConfigError(
            f"{config.source}: quantization_config is {shown(given)}; supported: quant_method fp8 "
            "with weight_block_size [rows, columns]"
        )
    return size[0], size[1]


@dataclass(frozen=True, slots=True)
class BlockScaled:
    """A checkpoint's tensors, with FP8 weights and their scales as `Narrow`."""

    source: Checkpoint
    block_size: tuple[int, int]

    @property
    def path(self) -> Path:
        return self.source.path

    @property
    def types(self) -> tuple[str, ...]:
        return ("FP8",)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        given = self.source.shapes.items()
        return {name: shape for name, shape in given if not name.endswith(_SCALE)}

    def tensors(self) -> Iterator[tuple[Path, str, Weight]]:
        scaled = {name.removesuffix(_SCALE) for name in self.source.shapes if name.endswith(_SCALE)}
        waiting: dict[str, torch.Tensor] = {}  # weights without their scales, and the reverse
        for path, name, tensor in self.source.tensors():
            weight = name.removesuffix(_SCALE)
            if weight not in scaled:
                yield path, name, tensor
            elif weight not in waiting:
                waiting[weight] = tensor
            else:
                other = waiting.pop(weight)
                pair = (tensor, other) if name == weight else (other, tensor)
                yield path, weight, self._narrow(path, weight, *pair)
        for name in waiting:
            raise LoadError(f"{name} or its {_SCALE} is missing from the checkpoint")

    def _narrow(self, path: Path, name: str, weight: torch.Tensor, scale: torch.Tensor) -> Weight:
        rows, columns = self.block_size
        blocks = [
            -(-size // side) for size, side in zip(weight.shape, (rows, columns), strict=False)
        ]
        if weight.dim() != 2 or list(scale.shape) != blocks:
            raise LoadError(
                f"{path}: tensor {name} of shape {list(weight.shape)} has scales of shape "
                f"{list(scale.shape)}; blocks of {rows} x {columns} need {blocks}"
            )
        rows = min(rows, weight.shape[0])
        by_row = scale.float().repeat_interleave(rows, 0)[: weight.shape[0]]
        matrix = Narrow(weight, by_row, min(columns, weight.shape[1]))
        # The kernel takes the bits of NaN for a number.
        return matrix.dense() if bool(weight.isnan().any()) else matrix
