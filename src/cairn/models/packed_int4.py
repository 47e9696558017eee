"""Checkpoints of GPTQ and AWQ: codes of 4 or 8 bits, packed into whole numbers of 32 bits.

A matrix `name.weight` is there as `name.qweight`, `name.qzeros` and `name.scales`. Columns share a
scale and a zero by groups; a weight is scale * (code - zero). GPTQ packs qweight along its inputs,
AWQ along its outputs; both pack qzeros along outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cairn.errors import LoadError
from cairn.models.blocks import BLOCK, Codes, Weight
from cairn.models.checkpoint import Checkpoint
from cairn.models.config_reader import ConfigReader
from cairn.models.fp8_checkpoint import FP8_METHODS, Fp8Format, read_fp8_format

METHODS = ("gptq", "awq")
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # output of each code in a packed number
_NAMES = ("qweight", "qzeros", "scales")
_GROUPS = "g_idx"  # of GPTQ: the group of each column

# Fields that say how codes are packed; others describe how they were found.
_GPTQ = {"bits": (4, 8), "desc_act": (False,), "checkpoint_format": ("gptq", "gptq_v2")}
_AWQ = {"bits": (4,), "version": ("gemm",)}


@dataclass(frozen=True, slots=True)
class Packing:
    method: str
    bits: int
    group_size: int  # columns; -1 for all
    zero_added: int
    """What is added to the stored zeros."""


def quantization_method(config: ConfigReader) -> str | None:
    """The field quant_method of `quantization_config`."""
    given = config.peek("quantization_config")
    method = given.get("quant_method") if isinstance(given, Mapping) else None
    return method if isinstance(method, str) else None


def read_quantization(config: ConfigReader) -> Packing | Fp8Format | None:
    """What `quantization_config` says: how codes are packed, how FP8 is scaled, or nothing."""
    method = quantization_method(config)
    if method in METHODS:
        return _read_packing(config)
    if method in FP8_METHODS:
        return read_fp8_format(config)
    if config.take_optional("quantization_config", dict) is None:
        return None
    raise config.unsupported(
        "quantization_config.quant_method",
        method,
        f"supported: {', '.join((*METHODS, *FP8_METHODS))}",
    )


def _read_packing(config: ConfigReader) -> Packing:
    """How GPTQ or AWQ has packed the matrices, from `quantization_config`."""
    given = config.take("quantization_config", dict)
    method = given["quant_method"]
    values: dict[str, Any] = {"checkpoint_format": "gptq", "desc_act": False, "version": "gemm"}
    values |= {name: value for name, value in given.items() if value is not None}
    for name, supported in (_GPTQ if method == "gptq" else _AWQ).items():
        value = values.get(name)
        value = value.lower() if isinstance(value, str) else value
        if value not in supported:
            raise config.unsupported(
                f"quantization_config.{name}",
                value,
                f"supported for {method}: {', '.join(map(str, supported))}",
            )
    size = values.get("group_size")
    if type(size) is not int or (size != -1 and (size < BLOCK or size % BLOCK)):
        raise config.unsupported(
            "quantization_config.group_size", size, f"supported: multiples of {BLOCK}, and -1"
        )
    older = method == "gptq" and values["checkpoint_format"] == "gptq"
    return Packing(method, values["bits"], size, int(older))


@dataclass(frozen=True, slots=True)
class Packed:
    """A checkpoint's tensors, with packed matrices as `Codes`."""

    source: Checkpoint
    packing: Packing

    @property
    def path(self) -> Path:
        return self.source.path

    @property
    def types(self) -> tuple[str, ...]:
        return (self.packing.method.upper(),)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in self.source.shapes.items():
            stem, _, part = name.rpartition(".")
            if part == "qweight" and len(shape) == 2:
                shapes[f"{stem}.weight"] = self._shape(shape)
            elif part not in (*_NAMES, _GROUPS):
                shapes[name] = shape
        return shapes

    def _shape(self, packed: tuple[int, ...]) -> tuple[int, int]:
        """[outputs, columns] of a matrix, from the shape of qweight."""
        many = 32 // self.packing.bits
        if self.packing.method == "gptq":
            return packed[1], packed[0] * many
        return packed[1] * many, packed[0]

    def tensors(self) -> Iterator[tuple[Path, str, Weight]]:
        waiting: dict[str, dict[str, torch.Tensor]] = {}
        for path, name, tensor in self.source.tensors():
            stem, _, part = name.rpartition(".")
            if part == _GROUPS:
                self._check_groups(path, name, tensor)
            elif part in _NAMES:
                own = waiting.setdefault(stem, {})
                own[part] = tensor
                if len(own) == len(_NAMES):
                    yield path, f"{stem}.weight", self._codes(path, stem, waiting.pop(stem))
            else:
                yield path, name, tensor
        for stem, own in waiting.items():
            missing = ", ".join(f"{stem}.{part}" for part in _NAMES if part not in own)
            raise LoadError(f"{self.path}: {missing} missing from the checkpoint")

    def _check_groups(self, path: Path, name: str, groups: torch.Tensor) -> None:
        columns = groups.numel()
        size = columns if self.packing.group_size == -1 else self.packing.group_size
        if not torch.equal(groups.flatten().long(), torch.arange(columns) // size):
            raise LoadError(
                f"{path}: tensor {name} assigns columns to groups in another order, as desc_act "
                "does; quantise the model without it"
            )

    def _codes(self, path: Path, stem: str, given: Mapping[str, torch.Tensor]) -> Codes:
        packing = self.packing
        qweight, qzeros, scales = (given[part] for part in _NAMES)
        if qweight.dim() != 2 or qweight.dtype != torch.int32 or qzeros.dtype != torch.int32:
            raise LoadError(f"{path}: {stem}.qweight and .qzeros must be matrices of int32")
        outputs, columns = self._shape(tuple(qweight.shape))
        groups = 1 if packing.group_size == -1 else columns // packing.group_size
        many = 32 // packing.bits
        sizes = (outputs % many, columns % (groups * BLOCK), *scales.shape, *qzeros.shape)
        if sizes != (0, 0, groups, outputs, groups, outputs // many):
            raise LoadError(
                f"{path}: {stem} is a matrix of {outputs} x {columns}; its scales have shape "
                f"{list(scales.shape)} and its zeros {list(qzeros.shape)}, which do not fit groups "
                f"of {packing.group_size}"
            )
        order = _AWQ_ORDER if packing.method == "awq" else range(many)
        if packing.method == "gptq":
            codes = _unpacked(qweight.t(), packing.bits, range(many))  # along the inputs
        else:
            codes = _unpacked(qweight, packing.bits, order).t()
        zeros = _unpacked(qzeros, packing.bits, order).t().to(torch.int16) + packing.zero_added
        scale = scales.t().to(torch.float16)
        if not torch.equal(scale.float(), scales.t().float()):
            raise LoadError(f"{path}: {stem}.scales has values that float16 does not have")
        codes, scale, bits = codes.contiguous(), scale.contiguous(), packing.bits
        if bool((zeros == zeros[0, 0]).all()):
            return Codes(codes, scale, offset=int(zeros[0, 0]), bits=bits)
        if int(zeros.max()) > 127:
            raise LoadError(f"{path}: {stem}.qzeros has zeros above 127 that differ by group")
        by_block = zeros.repeat_interleave(columns // BLOCK // groups, 1)[..., None]
        return Codes(codes, scale, -scale, None, by_block.to(torch.int8), bits=bits)


def _unpacked(packed: torch.Tensor, bits: int, order: Any) -> torch.Tensor:
    """int32 [rows, n] -> uint8 [rows, n * 32 / bits]; `order` has the place of each code among the
    codes of a number."""
    shifts = torch.arange(0, 32, bits)
    codes = (packed.long()[..., None] >> shifts & (1 << bits) - 1).to(torch.uint8)
    places = torch.tensor(list(order)).argsort()
    return codes[..., places].flatten(1)
