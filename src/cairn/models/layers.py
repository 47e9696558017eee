"""The few modules decoders are made of. Each knows how its weights are named in a checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from functools import cache, partial
from typing import Literal

import torch
import torch.nn.functional as F

from cairn.kernels.interface import FEW_ROWS, STREAMED_ROWS, streams
from cairn.models.blocks import BlockMatrix, Codes, Kept, Stack, stacked, stored
from cairn.models.gpu_matrix import GpuMatrix, GpuStack, can_store, gpu_matrix
from cairn.models.module import Factory, Module, TensorSlot
from cairn.models.narrow import NarrowMatrix
from cairn.models.parallel import Alone
from cairn.models.quantize import Rounding


class Embedding(Module):
    """Looks up rows of a table by id. Each rank has an equal share of the rows."""

    def __init__(self, rows: int, dim: int, factory: Factory) -> None:
        self._parallel = factory.parallel
        self._rows = rows
        self._own = own = -(-rows // self._parallel.size)
        self._first = self._parallel.rank * own
        self.weight = factory.empty(own, dim)
        self._few_rows = factory.few_rows
        self._keeps, self._cpu = factory.keep, factory.cpu
        self._fused = factory.fused
        self._stored: BlockMatrix | NarrowMatrix | GpuMatrix | None = None

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        if self._parallel.size > 1:
            return self._parallel.sum(self._own_rows(ids))
        return self._lookup(ids)

    def _lookup(self, ids: torch.Tensor) -> torch.Tensor:
        if self._stored is None:
            return F.embedding(ids, self.weight)
        return self._stored.rows(ids, self.weight.dtype)

    def _own_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows that this rank has, and zeros for the others, so that the sum is exact."""
        own = ids - self._first
        elsewhere = (own < 0) | (own >= self._own)
        rows = self._lookup(own.masked_fill(elsewhere, 0))
        return rows.masked_fill(elsewhere[:, None], 0)

    def agrees_with(self, table: torch.Tensor) -> bool:
        """Whether a copy of the whole table in the checkpoint equals this rank's rows."""
        weight = self.dense()
        if tuple(table.shape) != (self._rows, weight.shape[1]):
            return False
        own = table[self._first : self._first + len(weight)]
        return torch.equal(own.to(weight), weight[: len(own)])

    def quantize(self, rounding: Rounding) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Round the weight, if its width allows. Yields it before and after, in pieces."""
        if self.weight.shape[1] % rounding.columns == 0:
            pieces = []
            for before, after in rounding.in_pieces(self.weight):
                pieces.append(after)
                yield before, after.dense()
            self._keep(stacked(pieces))

    def draw(self, rounding: Rounding, std: float, generator: torch.Generator) -> bool:
        """Random weights as `quantize` would make them; returns whether the width allows it."""
        fits = self.weight.shape[1] % rounding.columns == 0
        if fits:
            self._keep(rounding.draw(tuple(self.weight.shape), std, generator))
        return fits

    def _keep(self, matrix: Kept) -> None:
        """Replace the weight by a matrix that stays as it is. A GPU keeps codes only."""
        if self._fused and not isinstance(matrix, Codes):
            self.weight.copy_(matrix.dense())
            return
        if self._fused:
            self._stored = gpu_matrix(matrix.to(self.weight.device))
        else:
            self._stored = stored([matrix], self._cpu)
        self.weight = self.weight.new_empty(0)

    @property
    def form(self) -> Hashable:
        """What decides which compiled kernels its products need; None in float."""
        own = self._stored
        return None if isinstance(own, BlockMatrix | NarrowMatrix | None) else own.form

    @property
    def quantised_bytes(self) -> int:
        return 0 if self._stored is None else self._stored.nbytes

    def dense(self) -> torch.Tensor:
        """The weight as checkpoints have it, [rows, dim]."""
        return self.weight if self._stored is None else self._stored.dense()

    def slots(self, name: str) -> Iterator[tuple[str, TensorSlot]]:
        keep = self._keep if self._keeps else None
        slot = TensorSlot(tuple(self.weight.shape), self.weight.copy_, keep=keep)
        yield f"{name}.weight", slot.share(0, self._parallel, self._rows)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The embedding as output head: [rows, dim] -> [rows, vocab], or a rank's part of it."""
        if self._stored is not None:
            return self._stored.product(hidden)
        if 0 < hidden.shape[0] <= self._few_rows:
            from cairn.kernels.gemv import gemv

            return gemv(hidden.contiguous(), self.weight)
        return few_rows_product(hidden, self.weight)


class Parameter(Module):
    """A tensor that has the module's name in the checkpoint. `split`: its first dimension is heads,
    and a rank has its own heads only."""

    def __init__(self, shape: tuple[int, ...], factory: Factory, *, split: bool = False) -> None:
        self.weight = factory.empty(*shape)
        self._parallel = factory.parallel if split else Alone()

    def slots(self, name: str) -> Iterator[tuple[str, TensorSlot]]:
        slot = TensorSlot(tuple(self.weight.shape), self.weight.copy_)
        yield name, slot.share(0, self._parallel)


class RMSNorm(Module):
    """`round_last`: the weight is applied before rounding to the model's type, not after it.
    `split`: every rank has `dim` elements of what is normed."""

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
        """The norm of stream + x, and that sum, which may be stored in place of `stream`.

        x may be in parts, see `Linear.in_parts`.
        """
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
        slot = TensorSlot(tuple(self.weight.shape), self.weight.copy_, is_norm=True)
        yield f"{name}.weight", slot.share(0, self._parallel)


Split = Literal["none", "out", "in"]
"""none: a rank has the whole matrix. out: it has some of the outputs. in: it has the columns of
some inputs, and the ranks' results must be summed."""


class Linear(Module):
    """x @ W.T + b, where W may be several checkpoint matrices stacked at load.

    `parts` maps the name of each matrix to the number of its rows that this rank has. In a
    checkpoint these names replace the last part of the module's name: q_proj, k_proj and v_proj for
    qkv_proj. Parts named in `whole` are on every rank, whatever `split` says. `total` is the number
    of rows in the checkpoint, which may be fewer than all ranks have. `orders` names, for some
    parts, the checkpoint's row for each of this rank's rows, counted within its share.

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
        orders: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self._parallel = factory.parallel
        self._orders = dict(orders or {})
        self._split, self._whole, self._total = split, frozenset(whole), total
        self.parts = dict(parts)
        self.in_features = in_features
        self._out_features = out_features = sum(self.parts.values())
        self._blocks = _column_blocks(out_features) if factory.device.type == "cpu" else 0
        if self._blocks:
            self.weight = factory.empty(self._blocks, in_features, out_features // self._blocks)
        else:
            self.weight = factory.later(out_features, in_features)
        self._device = factory.device
        self.bias = factory.empty(out_features) if bias else None
        self._fused = factory.fused
        self._few_rows = factory.few_rows
        if self._few_rows == FEW_ROWS and streams(out_features, in_features):
            self._few_rows = STREAMED_ROWS
        self._keeps, self._cpu = factory.keep, factory.cpu
        self._kept: dict[int, Kept] = {}  # parts that stay as they are, by first output
        self._stored: Stack | GpuStack | None = None

    def __call__(
        self, x: torch.Tensor, *, norm: RMSNorm | None = None, add_to: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The product with x, or with the norm of x; `add_to` takes the result, and is it."""
        if self._stored is not None:
            weights = None if norm is None else (norm.weight, norm.eps)
            return self._of_stored(self._stored, x, weights, silu=False, add_to=add_to)
        if self.bias is None and 0 < x.shape[0] <= self._few_rows:
            from cairn.kernels.gemv import gemv

            weights = None if norm is None else (norm.weight, norm.eps)
            return gemv(x.contiguous(), self.weight, norm=weights, add_to=add_to)
        out = self._product(x if norm is None else norm(x))
        return out if add_to is None else add_to.add_(out)

    def in_parts(self, x: torch.Tensor) -> torch.Tensor:
        """The product with x, or [parts, rows, out], whose sum it is: `RMSNorm.add` takes both.

        A product of few tiles, each with many columns, leaves most of a GPU idle. So the columns
        are cut into parts that are multiplied at the same time.
        """
        parts = 1
        if self._fused and self._stored is None and self.bias is None:
            parts = _column_parts(len(x), self.in_features, self._out_features)
        if parts == 1 or self.weight.dtype != torch.bfloat16 or self._parallel.size > 1:
            return self(x)
        cut = x.view(len(x), parts, -1).transpose(0, 1)  # [parts, rows, in / parts]
        weight = self.weight.view(self._out_features, parts, -1)
        return torch.bmm(cut, weight.permute(1, 2, 0), out_dtype=torch.float32)

    def _of_stored(
        self,
        matrix: Stack | GpuStack,
        x: torch.Tensor,
        norm: tuple[torch.Tensor, float] | None,
        *,
        silu: bool,
        add_to: torch.Tensor | None,
    ) -> torch.Tensor:
        out = matrix.product(x, add_to, norm=norm, silu=silu, add=add_to is not None)
        return out if self.bias is None else out.add_(self.bias)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if not self._blocks:
            return F.linear(x, self.weight, self.bias)
        elif len(x) > _MANY_ROWS:
            in_out = self.weight.transpose(0, 1).reshape(self.in_features, self._out_features)
            out = torch.mm(x, in_out)
        else:
            out = torch.bmm(x.expand(self._blocks, -1, -1), self.weight)  # [blocks, rows, columns]
            out = out.transpose(0, 1).reshape(len(x), self._out_features)
        return out if self.bias is None else out.add_(self.bias)

    def gated(self, x: torch.Tensor, norm: RMSNorm) -> torch.Tensor | None:
        """silu(gate) * up of the norm of x, where this is the product of gate and up and a kernel
        does both; else None."""
        if self.bias is not None or not isinstance(self._stored, GpuStack):
            return None
        return self._stored.gated(x, (norm.weight, norm.eps))

    def after_silu(
        self, gate_up: torch.Tensor, *, add_to: torch.Tensor | None = None, in_parts: bool = False
    ) -> torch.Tensor:
        """The product with silu(gate) * up, from both side by side: [rows, 2 * in]. `in_parts`: as
        the method of this name returns it."""
        if self._stored is not None:
            return self._of_stored(self._stored, gate_up, None, silu=True, add_to=add_to)
        if self._fused:
            from cairn.kernels.activation import silu_and_mul
            from cairn.kernels.gemv import gemv

            if self.bias is None and 0 < gate_up.shape[0] <= self._few_rows:
                return gemv(gate_up, self.weight, silu=True, add_to=add_to)
            activated = silu_and_mul(gate_up)
            return self.in_parts(activated) if in_parts else self(activated, add_to=add_to)
        gate, up = gate_up.chunk(2, dim=-1)
        return self(F.silu(gate).mul_(up), add_to=add_to)

    def slots(self, name: str) -> Iterator[tuple[str, TensorSlot]]:
        parent = name.rpartition(".")[0]
        begin = 0
        for part, rows in self.parts.items():
            target = f"{parent}.{part}" if parent else part
            split = "none" if part in self._whole else self._split
            order = self._orders.get(part)
            slot = TensorSlot(
                (rows, self.in_features),
                partial(self._write, begin, order),
                keep=partial(self._keep_part, begin, order) if self._keeps else None,
            )
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
            return TensorSlot(tuple(bias.shape), lambda _: bias.zero_())
        slot = TensorSlot(tuple(bias.shape), bias.copy_)
        return slot.share(0, self._parallel) if split == "out" else slot

    def quantize(self, rounding: Rounding) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Round the weight, if its width allows. Yields it before and after, in pieces."""
        if self.in_features % rounding.columns == 0:
            pieces = []
            for before, after in rounding.in_pieces(self.dense()):
                pieces.append(after)
                yield before, after.dense()
            self._store(pieces)

    def draw(self, rounding: Rounding, std: float, generator: torch.Generator) -> bool:
        """Random weights as `quantize` would make them; returns whether the width allows it."""
        fits = self.in_features % rounding.columns == 0
        if fits:
            shape = self._out_features, self.in_features
            self._store([rounding.draw(shape, std, generator)])
        return fits

    def _keep_part(self, begin: int, order: torch.Tensor | None, matrix: Kept) -> None:
        """Keep a checkpoint matrix as it is. Once all parts have come, they replace the weight."""
        self._kept[begin] = matrix if order is None else matrix.with_rows(order)
        if sum(part.shape[0] for part in self._kept.values()) == self._out_features:
            self._store([self._kept.pop(first) for first in sorted(self._kept)])

    def _store(self, parts: list[Kept]) -> None:
        if not self._fused:
            self._stored = Stack(parts, self._cpu)
        elif all(map(can_store, parts)):
            self._stored = GpuStack(parts, self._device)
        else:
            begin = 0
            for part in parts:
                self._write(begin, None, part.dense())
                begin += part.shape[0]
            return
        self.weight = self.weight.new_empty(0, device=self._device)

    @property
    def form(self) -> Hashable:
        """What decides which compiled kernels its products need; None in float."""
        return self._stored.form if isinstance(self._stored, GpuStack) else None

    @property
    def is_slow(self) -> bool:
        """As `GpuStack.is_slow`."""
        return isinstance(self._stored, GpuStack) and self._stored.is_slow

    @property
    def quantised_bytes(self) -> int:
        return 0 if self._stored is None else self._stored.nbytes

    def _write(self, begin: int, order: torch.Tensor | None, matrix: torch.Tensor) -> None:
        """Copy a checkpoint matrix [rows, in] to output rows `begin` onwards."""
        if order is not None:
            matrix = matrix[order]
        if self.weight.is_meta:
            self.weight = torch.empty_like(self.weight, device=self._device)
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
        if self._stored is not None:
            return self._stored.dense()
        if not self._blocks:
            return self.weight
        return (
            self.weight.transpose(1, 2).reshape(self._out_features, self.in_features).contiguous()
        )


_PARTS = ((FEW_ROWS, 1), (128, 4), (256, 2))
"""Most rows of a product on a GPU, and into how many parts it is cut; measured on an H200."""
_PART_OUTPUTS = 1024  # most outputs of a product that is cut


def row_rungs() -> tuple[int, ...]:
    """Row counts at which the number of parts changes."""
    return tuple(most + 1 for most, _ in _PARTS)


def _column_parts(rows: int, columns: int, outputs: int) -> int:
    """Number of parts into which a product is cut. It depends on sizes alone, so that results can
    be reproduced."""
    parts = next((parts for most, parts in _PARTS if rows <= most), 1)
    fits = outputs <= _PART_OUTPUTS and columns >= 2 * _PART_OUTPUTS and columns % (64 * parts) == 0
    return parts if fits else 1


_BLOCK_COLUMNS = 48
_FEW_ROWS = 32  # with more, one large product is as good for the output head
_MANY_ROWS = 512  # from here on putting the blocks together first pays


@cache
def _column_blocks(columns: int) -> int:
    """Number of equal blocks of about 48 columns; 1 if no such size divides them."""
    sizes = [n for n in range(24, 97) if columns % n == 0]
    if not sizes:
        return 1
    return columns // min(sizes, key=lambda n: abs(n - _BLOCK_COLUMNS))


def few_rows_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [rows, in] @ weight [out, in].T. On a CPU a few rows are multiplied with blocks of the
    weight's rows in one batched product, for the same reason as in Linear."""
    rows = len(x)
    blocks = 1
    if x.device.type == "cpu" and 1 < rows <= _FEW_ROWS:
        blocks = _column_blocks(len(weight))
    if blocks == 1:
        return F.linear(x, weight)
    in_blocks = weight.view(blocks, -1, weight.shape[1]).transpose(1, 2)
    out = torch.bmm(x.expand(blocks, -1, -1), in_blocks)
    return out.transpose(0, 1).reshape(rows, -1)


def named_slots(model: Module) -> dict[str, TensorSlot]:
    """Every checkpoint tensor the model needs, by name."""
    return dict(slot for name, module in model.named_modules() for slot in module.slots(name))


def warm_up_products(model: Module, row_counts: Iterable[int]) -> None:
    """Multiply each shape of matrix once with each number of rows. GPU libraries choose and load a
    kernel when they first see a size, which takes as long as a whole step."""
    shapes: dict[Hashable, Linear] = {}
    for _, module in model.named_modules():
        if isinstance(module, Linear):
            shapes.setdefault((module.in_features, sum(module.parts.values()), module.form), module)
    for rows in row_counts:
        for linear in shapes.values():
            linear(linear.weight.new_zeros(rows, linear.in_features))
