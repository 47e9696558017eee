"""The few modules decoders are made of. Each knows how its weights are named in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F

from cairn.kernels.interface import FEW_ROWS
from cairn.models.module import Module
from cairn.models.parallel import Alone, Parallel
from cairn.models.quantize import Int8Matrix


@dataclass(frozen=True, slots=True)
class Factory:
    """Where and in which type parameters are made."""

    dtype: torch.dtype
    device: torch.device
    fused: bool = False
    """Use Triton kernels for what lies between matrix products."""
    parallel: Parallel = field(default_factory=Alone)

    @property
    def few_rows(self) -> int:
        """Products of at most so many rows have a kernel of their own; but in bfloat16 only those
        of one: tensor cores take rows before their norm has scaled them, which is beyond what
        float16 holds, and float32 has none."""
        return (FEW_ROWS if self.dtype == torch.bfloat16 else 1) if self.fused else 0

    def products_do_more(self, rows: int) -> bool:
        """Products of so few rows take the norm before and the addition after them along."""
        return 0 < rows <= self.few_rows and self.parallel.size == 1

    def empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """A place that one checkpoint tensor fills."""

    shape: tuple[int, ...]
    write: Callable[[torch.Tensor], None]
    is_norm: bool = False

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

        return replace(self, shape=(*self.shape[:dim], whole, *self.shape[dim + 1 :]), write=write)


class WeightModule(Module):
    """A leaf with weights. `slots(name)` yields them under their checkpoint names."""

    def slots(self, name: str) -> Iterator[tuple[str, TensorSlot]]:
        raise NotImplementedError


class Embedding(WeightModule):
    """A table by row numbers, of which each rank has an equal share of rows."""

    def __init__(self, rows: int, dim: int, factory: Factory) -> None:
        self._parallel = factory.parallel
        self._rows = rows
        own = -(-rows // self._parallel.size)
        self._first = self._parallel.rank * own
        self.weight = factory.empty(own, dim)
        self._blocks = _column_blocks(own) if factory.device.type == "cpu" else 1
        self._few_rows = factory.few_rows
        self._int8: Int8Matrix | None = None

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        if self._parallel.size > 1:
            return self._parallel.sum(self._own_rows(ids))
        if self._int8 is not None:
            return self._int8.rows(ids)
        return F.embedding(ids, self.weight)

    def _own_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows this rank has, zeros for the others: the ranks' sum is exact."""
        own = ids - self._first
        elsewhere = (own < 0) | (own >= len(self.weight))
        rows = F.embedding(own.masked_fill(elsewhere, 0), self.weight)
        return rows.masked_fill(elsewhere[:, None], 0)

    def agrees_with(self, table: torch.Tensor) -> bool:
        """The checkpoint's other copy of the table, as far as this rank has it, is the same."""
        if tuple(table.shape) != (self._rows, self.weight.shape[1]):
            return False
        own = table[self._first : self._first + len(self.weight)]
        return torch.equal(own.to(self.weight), self.weight[: len(own)])

    def quantize(self) -> tuple[torch.Tensor, Int8Matrix]:
        """Replace the weight by its int8 form; returns both."""
        dense, self._int8 = self.weight, Int8Matrix.of(self.weight)
        self.weight = self.weight.new_empty(0)
        return dense, self._int8

    def slots(self, name: str) -> Iterator[tuple[str, TensorSlot]]:
        slot = TensorSlot(tuple(self.weight.shape), _copier(self.weight))
        yield f"{name}.weight", slot.share(0, self._parallel, self._rows)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The embedding as output head: [rows, dim] -> [rows, vocab], or a rank's part of it."""
        if self._int8 is not None:
            return self._int8.product(hidden)
        rows = hidden.shape[0]
        if 0 < rows <= self._few_rows:
            from cairn.kernels.gemv import gemv

            return gemv(hidden.contiguous(), self.weight)
        if self._blocks == 1 or not 1 < rows <= _FEW_ROWS:
            return F.linear(hidden, self.weight)
        # The same trick as in Linear, on the rows of the embedding as they lie.
        blocks = self.weight.view(self._blocks, -1, self.weight.shape[1])
        out = torch.bmm(hidden.expand(self._blocks, -1, -1), blocks.transpose(1, 2))
        return out.transpose(0, 1).reshape(rows, -1)


class Parameter(WeightModule):
    """A tensor that stands in the checkpoint under its own name; `split` if its first dimension is
    that of the heads, of which a rank has its own."""

    def __init__(self, shape: tuple[int, ...], factory: Factory, *, split: bool = False) -> None:
        self.weight = factory.empty(*shape)
        self._parallel = factory.parallel if split else Alone()

    def slots(self, name: str) -> Iterator[tuple[str, TensorSlot]]:
        slot = TensorSlot(tuple(self.weight.shape), _copier(self.weight))
        yield name, slot.share(0, self._parallel)


class RMSNorm(WeightModule):
    """`round_last`: the weight is applied before rounding to the model's type, not after it.
    `split`: what is normed lies on all ranks, `dim` of it on each."""

    def __init__(
        self,
        dim: int,
        eps: float,
        factory: Factory,
        *,
        round_last: bool = False,
        split: bool = False,
    ) -> None:
        self.weight = factory.empty(dim)
        self.eps = eps
        self._parallel = factory.parallel if split else Alone()
        self._fused = factory.fused
        self._eps_tensor = torch.tensor(eps, dtype=factory.dtype, device=factory.device)
        self._round_last = round_last

    def add(
        self, x: torch.Tensor, stream: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of stream + x, and that sum, which may be stored in place of `stream`."""
        if stream is None:
            return self(x), x
        if self._fused:
            from cairn.kernels.norm import add_rms_norm

            return add_rms_norm(x, stream, self.weight, self.eps), stream
        stream = stream + x
        return self(stream), stream

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._parallel.size > 1:
            return self._over_ranks(x)
        if self._fused:
            from cairn.kernels.norm import rms_norm

            return rms_norm(x.reshape(-1, x.shape[-1]), self.weight, self.eps).view(x.shape)
        if x.dtype in (torch.float32, torch.float64):
            # Five small operations; torch's own rms_norm is made of nine.
            length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            scale = torch.addcmul(self._eps_tensor, length, length, value=1 / x.shape[-1])
            return (x * scale.rsqrt_()).mul_(self.weight)
        wide = x.to(torch.float32)
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self._weighted(scaled, x.dtype)

    def _over_ranks(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = self._parallel.sum(wide.square().sum(-1, keepdim=True))
        mean = squares / (x.shape[-1] * self._parallel.size)
        return self._weighted(wide * torch.rsqrt(mean + self.eps), x.dtype)

    def _weighted(self, scaled: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if self._round_last:
            return (self.weight * scaled).to(dtype)
        return self.weight * scaled.to(dtype)

    def slots(self, name: str) -> Iterator[tuple[str, TensorSlot]]:
        slot = TensorSlot(tuple(self.weight.shape), _copier(self.weight), is_norm=True)
        yield f"{name}.weight", slot.share(0, self._parallel)


Split = Literal["none", "out", "in"]
"""What of a matrix a rank has: all of it, some of its outputs, or what it does with some inputs,
so that the ranks' results must be added up."""


class Linear(WeightModule):
    """x @ W.T + b, where W may be several checkpoint matrices stacked at load.

    `parts` maps the name of each matrix to the rows of it that this rank has. They stand in the
    checkpoint where the layer stands in the model: q_proj, k_proj, v_proj beside qkv_proj, o_proj
    in its own place. Parts named in `whole` are on every rank, whatever `split` says; `total` rows
    in the checkpoint may be fewer than all ranks have.

    On a CPU W is kept as blocks of a few output columns, [blocks, in, out / blocks], and
    multiplied as one batched product: with few rows that runs at the speed of memory, which one
    large product does not.
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        factory: Factory,
        *,
        bias: bool = False,
        split: Split = "none",
        whole: Collection[str] = (),
        total: int | None = None,
    ) -> None:
        self._parallel = factory.parallel
        self._split, self._whole, self._total = split, frozenset(whole), total
        self.parts = dict(parts)
        self.in_features = in_features
        self._out_features = out_features = sum(self.parts.values())
        self._blocks = _column_blocks(out_features) if factory.device.type == "cpu" else 0
        if self._blocks:
            self.weight = factory.empty(self._blocks, in_features, out_features // self._blocks)
        else:
            self.weight = factory.empty(out_features, in_features)
        self.bias = factory.empty(out_features) if bias else None
        self._fused = factory.fused
        self._few_rows = factory.few_rows
        self._int8: Int8Matrix | None = None

    def quantize(self) -> tuple[torch.Tensor, Int8Matrix]:
        """Replace the weight by its int8 form; returns both."""
        dense = self.dense()
        self._int8 = Int8Matrix.of(dense)
        self.weight = self.weight.new_empty(0)
        return dense, self._int8

    def __call__(
        self, x: torch.Tensor, *, norm: RMSNorm | None = None, add_to: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The product with x, or with the norm of x; `add_to` takes the result, and is it."""
        if self.bias is None and 0 < x.shape[0] <= self._few_rows:
            from cairn.kernels.gemv import gemv

            weights = None if norm is None else (norm.weight, norm.eps)
            return gemv(x.contiguous(), self.weight, norm=weights, add_to=add_to)
        out = self._product(x if norm is None else norm(x))
        return out if add_to is None else add_to.add_(out)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if self._int8 is not None:
            out = self._int8.product(x)
            return out if self.bias is None else out.add_(self.bias)
        rows = x.shape[0]
        if not self._blocks:
            return F.linear(x, self.weight, self.bias)
        if rows > _MANY_ROWS:
            in_out = self.weight.transpose(0, 1).reshape(self.in_features, self._out_features)
            out = torch.mm(x, in_out)
            return out if self.bias is None else out.add_(self.bias)
        out = torch.bmm(x.expand(self._blocks, -1, -1), self.weight)  # [blocks, rows, columns]
        out = out.transpose(0, 1).reshape(rows, self._out_features)
        return out if self.bias is None else out.add_(self.bias)

    def after_silu(
        self, gate_up: torch.Tensor, *, add_to: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The product with silu(gate) * up, from both side by side: [rows, 2 * in]."""
        if self._fused:
            from cairn.kernels.activation import silu_and_mul
            from cairn.kernels.gemv import gemv

            if self.bias is None and 0 < gate_up.shape[0] <= self._few_rows:
                return gemv(gate_up, self.weight, silu=True, add_to=add_to)
            return self(silu_and_mul(gate_up), add_to=add_to)
        gate, up = gate_up.chunk(2, dim=-1)
        return self(F.silu(gate).mul_(up), add_to=add_to)

    def slots(self, name: str) -> Iterator[tuple[str, TensorSlot]]:
        parent = name.rpartition(".")[0]
        begin = 0
        for part, rows in self.parts.items():
            target = f"{parent}.{part}" if parent else part
            split = "none" if part in self._whole else self._split
            slot = TensorSlot((rows, self.in_features), partial(self._write, begin))
            if split == "out":
                slot = slot.share(0, self._parallel, self._total)
            elif split == "in":
                slot = slot.share(1, self._parallel)
            yield f"{target}.weight", slot
            if self.bias is not None:
                yield f"{target}.bias", self._bias_slot(self.bias[begin : begin + rows], split)
            begin += rows

    def _bias_slot(self, bias: torch.Tensor, split: Split) -> TensorSlot:
        if split == "in" and self._parallel.rank:
            # What the ranks add up has the bias once, from rank 0.
            return TensorSlot(tuple(bias.shape), lambda _: _clear(bias))
        slot = TensorSlot(tuple(bias.shape), _copier(bias))
        return slot.share(0, self._parallel) if split == "out" else slot

    def _write(self, begin: int, matrix: torch.Tensor) -> None:
        """Copy a checkpoint matrix [rows, in] to output rows `begin` onwards."""
        weight = self.weight
        if not self._blocks:
            weight[begin : begin + len(matrix)].copy_(matrix)
            return
        columns = weight.shape[2]
        for block in range(begin // columns, -(-(begin + len(matrix)) // columns)):
            first = max(begin, block * columns)
            last = min(begin + len(matrix), (block + 1) * columns)
            target = weight[block, :, first - block * columns : last - block * columns]
            target.copy_(matrix[first - begin : last - begin].t())

    def dense(self) -> torch.Tensor:
        """The weight as checkpoints have it, [out, in]; a copy on a CPU."""
        if not self._blocks:
            return self.weight
        return (
            self.weight.transpose(1, 2).reshape(self._out_features, self.in_features).contiguous()
        )


_BLOCK_COLUMNS = 48
_FEW_ROWS = 32  # with more, one large product is as good for the output head
_MANY_ROWS = 512  # from here on putting the blocks together first pays


def _column_blocks(columns: int) -> int:
    """How many equal blocks, of as nearly 48 columns as can be; one where nothing is near."""
    sizes = [n for n in range(24, 97) if columns % n == 0]
    if not sizes:
        return 1
    return columns // min(sizes, key=lambda n: abs(n - _BLOCK_COLUMNS))


def named_slots(model: Module) -> dict[str, TensorSlot]:
    """Every checkpoint tensor the model needs, by name."""
    return dict(
        slot
        for name, module in model.named_modules()
        if isinstance(module, WeightModule)
        for slot in module.slots(name)
    )


def warm_up_products(model: Module, row_counts: Iterable[int]) -> None:
    """Multiply each shape of matrix once with so many rows. GPU libraries choose and load a kernel
    when they first meet a size, which takes as long as a whole step."""
    shapes: dict[tuple[int, ...], Linear] = {}
    for _, module in model.named_modules():
        if isinstance(module, Linear):
            shapes.setdefault(tuple(module.weight.shape), module)
    for rows in row_counts:
        for linear in shapes.values():
            linear(linear.weight.new_zeros(rows, linear.in_features))


def _clear(target: torch.Tensor) -> None:
    target.zero_()


def _copier(target: torch.Tensor) -> Callable[[torch.Tensor], None]:
    def copy(source: torch.Tensor) -> None:
        target.copy_(source)

    return copy
