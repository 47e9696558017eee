"""What modules are: objects with weights. Where weights are made, and the places that checkpoint
tensors fill."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch

from cairn.kernels.cpu import CpuKernels
from cairn.kernels.interface import FEW_ROWS
from cairn.models.blocks import Kept
from cairn.models.parallel import Alone, Parallel


class Module:
    """An object with weights and other modules as attributes.

    Not torch's nn.Module: inference needs no gradients, hooks or buffers, and on a CPU their cost
    per call is a fair part of a small model's step.
    """

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """This module and all below it, depth first, under dotted names."""
        yield prefix, self
        dot = f"{prefix}." if prefix else ""
        for name, value in vars(self).items():
            if isinstance(value, Module):
                yield from value.named_modules(f"{dot}{name}")
            elif isinstance(value, list):
                for index, item in enumerate(value):
                    if isinstance(item, Module):
                        yield from item.named_modules(f"{dot}{name}.{index}")

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All weights, by name. Private attributes are not weights."""
        for module_name, module in self.named_modules():
            for name, value in vars(module).items():
                if isinstance(value, torch.Tensor) and not name.startswith("_"):
                    yield f"{module_name}.{name}", value

    def bytes_by_module(self) -> dict[str, int]:
        """Bytes of each module's own weights, quantised or not."""
        sizes = {name: module.quantised_bytes for name, module in self.named_modules()}
        for name, tensor in self.named_tensors():
            sizes[name.rpartition(".")[0]] += tensor.nbytes
        return sizes

    @property
    def quantised_bytes(self) -> int:
        """Bytes of its own weights that are no tensors in float."""
        return 0

    def slots(self, name: str) -> Iterator[tuple[str, TensorSlot]]:
        """Its own weights, without those of modules below it, under their checkpoint names."""
        yield from ()

    def joint_slots(self, name: str) -> Iterator[tuple[str, TensorSlot, tuple[str, ...]]]:
        """Tensors that some checkpoints have instead of several of `slots`, and the names of
        those."""
        yield from ()


@dataclass(frozen=True, slots=True)
class Factory:
    """Where and in which type parameters are made."""

    dtype: torch.dtype
    device: torch.device
    fused: bool = False
    """Use Triton kernels for what lies between matrix products."""
    parallel: Parallel = field(default_factory=Alone)
    keep: bool = False
    """Matrices stay as their file has them: all on a CPU in float32, quantised ones on a GPU."""
    cpu: CpuKernels | None = None
    """Kernels for matrices that are kept; without them torch multiplies, slowly."""

    @property
    def few_rows(self) -> int:
        """Most rows of a product that the small-batch kernel computes; 0 without it.

        Only bfloat16 has more than one. The tensor cores multiply rows before the norm has scaled
        them: that is beyond float16's range, and for float32 there are no tensor cores.
        """
        return (FEW_ROWS if self.dtype == torch.bfloat16 else 1) if self.fused else 0

    def fuses_norms(self, rows: int) -> bool:
        """Products of this many rows include the norm before them and the addition after them."""
        return (self.cpu is not None or 0 < rows <= self.few_rows) and self.parallel.size == 1

    def empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def later(self, *shape: int) -> torch.Tensor:
        """`empty` for a matrix that may come quantised, which then takes no memory in float: on the
        device `meta` until it is written."""
        if self.keep and self.device.type == "cuda":
            return replace(self, device=torch.device("meta")).empty(*shape)
        return self.empty(*shape)


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """A place that one checkpoint tensor fills."""

    shape: tuple[int, ...]
    write: Callable[[torch.Tensor], object]
    is_norm: bool = False
    keep: Callable[[Kept], object] | None = None
    """Takes a matrix that is to stay as it is; None where that is not possible."""

    def share(self, dim: int, parallel: Parallel, total: int | None = None) -> TensorSlot:
        """The same slot for a checkpoint tensor of which it takes this rank's share along `dim`.

        Shares are equal; where `total` is less than all of them, zeros fill the last ones.
        """
        if parallel.size == 1:
            return self
        part = self.shape[dim]
        whole = part * parallel.size if total is None else total
        begin = min(parallel.rank * part, whole)
        count = min(part, whole - begin)

        def write(tensor: torch.Tensor) -> None:
            own = tensor.narrow(dim, begin, count)
            if count < part:
                padding = list(own.shape)
                padding[dim] = part - count
                own = torch.cat((own, own.new_zeros(padding)), dim)
            self.write(own)

        def keep_share(matrix: Kept) -> None:
            assert self.keep is not None
            self.keep(matrix.narrow(dim, begin, count))

        shape = (*self.shape[:dim], whole, *self.shape[dim + 1 :])
        # A share with padding is made of float weights.
        keeps = self.keep is not None and whole == part * parallel.size
        return replace(self, shape=shape, write=write, keep=keep_share if keeps else None)
