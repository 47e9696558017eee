"""A mixture of experts: a router picks a few feed-forwards for each row and weighs their outputs.

`route` and `experts` are functions on tensors, in plain torch. On a GPU the kernels of the same
names take their place (`kernels/route.py`, `kernels/experts.py`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from cairn.errors import ConfigError, LoadError
from cairn.kernels.cpu import CpuKernels, FloatsPlace
from cairn.kernels.interface import NARROW_ROWS, Routing, of_blocks
from cairn.models.blocks import Kept, Stack
from cairn.models.decoder import MLP, FeedForward
from cairn.models.fp8 import readable, to_fp8
from cairn.models.layers import RMSNorm
from cairn.models.module import Factory, Module, TensorSlot
from cairn.models.narrow import Narrow, NarrowMatrix
from cairn.models.quantize import MOST_ROUNDED, Rounding
from cairn.models.spec import DecoderSpec
from cairn.models.split import share

_MIXED = "experts of one layer must be all FP8, or none of them"


def route(
    logits: torch.Tensor,  # [rows, experts] float32 or float64
    bias: torch.Tensor | None,  # [experts]
    options: Routing,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The chosen experts of each row: weights [rows, per_token] and ids [rows, per_token] int32,
    best first. Of equal scores the lower id wins."""
    sigmoid = options.scoring == "sigmoid"
    scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
    choice = scores if bias is None else scores + bias
    if options.groups > 1:
        grouped = choice.view(len(choice), options.groups, -1)
        # A group's score: its best expert, or with sigmoid the sum of its two best.
        best = grouped.topk(min(2, grouped.shape[2]) if sigmoid else 1, -1).values.sum(-1)
        dropped = _best_first(best)[:, options.kept_groups :]
        kept = torch.ones_like(best, dtype=torch.bool).scatter_(1, dropped, False)
        choice = grouped.masked_fill(~kept[:, :, None], float("-inf")).flatten(1)
    ids = _best_first(choice)[:, : options.per_token]
    weights = scores.gather(1, ids)
    if options.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if sigmoid else 0))
    return weights * options.scale, ids.int()


def _best_first(scores: torch.Tensor) -> torch.Tensor:
    """Indices in descending order of score. topk would leave the order of equal ones open."""
    return scores.sort(dim=-1, descending=True, stable=True).indices


def experts(
    x: torch.Tensor,  # [rows, hidden]
    ids: torch.Tensor,  # [rows, k] int32; -1 for an expert that is on another rank
    weights: torch.Tensor,  # [rows, k]
    gate_up: torch.Tensor,  # [experts, 2 * inter, hidden], gate first
    down: torch.Tensor,  # [experts, hidden, inter]
) -> torch.Tensor:
    """The weighted sum of the chosen experts' outputs, [rows, hidden]. On a CPU only the weights of
    chosen experts are read."""

    if len(x) == 1 and not x.is_cuda:
        return _one_row(x[0], ids[0].tolist(), weights[0], gate_up, down)[None]

    def one(expert: int, rows: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(rows, gate_up[expert]).chunk(2, -1)
        return F.linear(F.silu(gate).mul_(up), down[expert])

    return by_expert(x, ids, weights, len(gate_up), one)


def fp8_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: Narrow,  # [experts, 2 * inter, hidden]
    down: Narrow,  # [experts, hidden, inter]
    spans: tuple[int, int],
) -> torch.Tensor:
    """`experts` with FP8 weights, where the inputs of both products are rounded to FP8 with a scale
    for each row and so many columns: what `kernels/fp8_experts.py` computes."""

    def dense(stack: Narrow, expert: int) -> torch.Tensor:
        assert stack.scale is not None
        return Narrow(stack.values[expert], stack.scale[expert], stack.span).dense().to(x.dtype)

    def one(expert: int, rows: torch.Tensor) -> torch.Tensor:
        rounded = to_fp8(rows, spans[0]).dense().to(x.dtype)
        gate, up = F.linear(rounded, dense(gate_up, expert)).chunk(2, -1)
        rounded = to_fp8(F.silu(gate).mul_(up), spans[1]).dense().to(x.dtype)
        return F.linear(rounded, dense(down, expert))

    return by_expert(x, ids, weights, len(gate_up.values), one)


def _one_row(
    x: torch.Tensor,  # [hidden]
    ids: list[int],
    weights: torch.Tensor,  # [k]
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """`experts` of a single row, with two operations for each expert."""
    chosen = [(slot, expert) for slot, expert in enumerate(ids) if expert >= 0]
    both = x.new_empty(len(ids), gate_up.shape[1])
    for slot, expert in chosen:
        torch.mv(gate_up[expert], x, out=both[slot])
    gate, up = both.chunk(2, -1)
    inner = F.silu(gate).mul_(up).mul_(weights.to(x.dtype)[:, None])
    out = torch.zeros_like(x)
    for slot, expert in chosen:
        out.addmv_(down[expert], inner[slot])
    return out


def by_expert(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    count: int,
    one: Callable[[int, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """`experts`, with one(expert, rows) [n, hidden] -> [n, hidden] for each of `count` experts."""
    out = torch.zeros_like(x)
    weights = weights.to(x.dtype)
    if x.is_cuda:
        # Every expert computes every row, so that shapes do not depend on what is chosen: a step
        # that is recorded cannot ask the device.
        for expert in range(count):
            weight = torch.where(ids == expert, weights, 0).sum(-1, keepdim=True)
            out += weight * one(expert, x)
        return out
    per_token = ids.shape[1]
    chosen, order = ids.flatten().sort(stable=True)
    found, counts = torch.unique_consecutive(chosen, return_counts=True)
    begin = 0
    for expert, count in zip(found.tolist(), counts.tolist(), strict=True):
        pairs = order[begin : begin + count]
        begin += count
        if expert >= 0:
            rows = pairs // per_token
            weighted = one(expert, x[rows]) * weights.view(-1)[pairs, None]
            out.index_add_(0, rows, weighted)
    return out


class Router(Module):
    """Scores of experts. Its weights are never rounded to int8."""

    def __init__(self, hidden: int, options: Routing, factory: Factory, *, wide: bool) -> None:
        """`wide`: logits are computed in float32, whatever the model's type."""
        self._options = options
        self._dtype = factory.dtype
        at_least = torch.promote_types(factory.dtype, torch.float32)
        kept = replace(factory, dtype=at_least if wide else factory.dtype)
        self.weight = kept.empty(options.experts, hidden)
        self.bias = None
        if options.has_bias:
            self.bias = replace(factory, dtype=at_least).empty(options.experts)
        self._rounds = not wide
        self._fused, self._few_rows = kept.fused, kept.few_rows

    def __call__(
        self, x: torch.Tensor, *, norm: RMSNorm | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [rows, hidden], or its norm -> weights and ids of the chosen experts, as `route`
        returns them"""
        if self._fused:
            return self._by_kernels(x, norm)
        x = x if norm is None else norm(x)
        logits = F.linear(x.to(self.weight.dtype), self.weight)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        weights, ids = route(wide, self.bias, self._options)
        return (weights.to(self._dtype) if self._rounds else weights), ids

    def _by_kernels(
        self, x: torch.Tensor, norm: RMSNorm | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from cairn.kernels import gemv, route

        few = 0 < len(x) <= self._few_rows and x.dtype == self.weight.dtype
        if few:
            own = None if norm is None else (norm.weight, norm.eps)
            logits = gemv.gemv(x.contiguous(), self.weight, norm=own)
        else:
            x = x if norm is None else norm(x)
            if self.weight.dtype == torch.float32 and 0 < len(x) <= NARROW_ROWS:
                logits = gemv.narrow_product(x.contiguous(), self.weight)
            else:
                logits = F.linear(x.to(self.weight.dtype), self.weight)
        rounded = self._dtype if self._rounds else torch.float32
        return route.route(logits, self.bias, self._options, rounded)

    def slots(self, name: str) -> Iterator[tuple[str, TensorSlot]]:
        yield f"{name}.weight", TensorSlot(tuple(self.weight.shape), self.weight.copy_)
        if self.bias is not None:
            slot = TensorSlot(tuple(self.bias.shape), self.bias.copy_)
            yield f"{name}.e_score_correction_bias", slot


class KeptExperts:
    """Experts whose matrices stay as they are in the file: (gate_up, down) of each."""

    def __init__(self, pairs: list[tuple[Stack, Stack]], kernels: CpuKernels | None) -> None:
        self._pairs, self._kernels = pairs, kernels
        gate_up, down = (_places([pair[i] for pair in pairs]) for i in range(2))
        self._places = None if gate_up is None or down is None else (gate_up, down)

    @property
    def nbytes(self) -> int:
        return sum(stack.nbytes for pair in self._pairs for stack in pair)

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if self._kernels is not None and self._places is not None:
            return self._kernels.experts(*self._places, x, ids, weights)
        return by_expert(x, ids, weights, len(self._pairs), self._product)

    def _product(self, expert: int, rows: torch.Tensor) -> torch.Tensor:
        gate_up, down = self._pairs[expert]
        return down.product(gate_up.product(rows), silu=True)


def _places(stacks: list[Stack]) -> ctypes.Array[FloatsPlace] | None:
    """Where the kernel for experts finds their matrices; None if it cannot multiply them."""
    matrices = [stack.single for stack in stacks]
    places = [matrix.place for matrix in matrices if isinstance(matrix, NarrowMatrix)]
    return (FloatsPlace * len(places))(*places) if len(places) == len(stacks) else None


class ExpertWeights(Module):
    """The feed-forwards of this rank's experts. A checkpoint has one tensor for each expert and
    matrix, or one for all experts."""

    def __init__(self, hidden: int, inter: int, count: int, factory: Factory) -> None:
        """`count` experts in all, of which each rank has an equal share."""
        own = share("the number of experts", count, factory.parallel.size)
        self.first = factory.parallel.rank * own
        self._own, self._count = own, count
        self._hidden, self._inter = hidden, inter
        self._device = factory.device
        self.gate_up = factory.later(own, 2 * inter, hidden)
        if factory.device.type == "cpu" and not factory.fused:
            # A CPU reads rows of `hidden` numbers faster than the shorter ones.
            self.down = factory.empty(own, inter, hidden).transpose(1, 2)
        else:
            self.down = factory.later(own, hidden, inter)
        self._keeps, self._cpu = factory.keep, factory.cpu
        self._parts: dict[int, dict[str, Kept]] = {}  # those that have come, by expert
        self._pairs: dict[int, tuple[Stack, Stack]] = {}  # of experts whose parts have all come
        self._kept: KeptExperts | None = None
        self._fp8: dict[str, Narrow] = {}  # stacks in place of `gate_up` and `down`, for kernels
        self._of_blocks = True  # so far, see `ExpertScales`
        self._any_float = False
        self._fused = factory.fused

    def row_rungs(self, per_token: int) -> tuple[int, ...]:
        """Row counts at which products switch to other compiled kernels."""
        from cairn.kernels import experts as kernels

        return kernels.row_rungs(per_token, self._count)

    def __call__(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        add_to: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The output, or what `add_to` is then: it is added there."""
        if self._own < self._count:
            ids = ids - self.first
            ids = torch.where((ids >= 0) & (ids < self._own), ids, -1)
        if self._fused:
            return self._by_kernels(x, ids, weights, add_to=add_to)
        if self._kept is not None:
            out = self._kept(x, ids, weights)
        else:
            out = experts(x, ids, weights, self.gate_up, self.down)
        return out if add_to is None else add_to.add_(out)

    def add_normed(
        self, x: torch.Tensor, norm: RMSNorm, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Add the output for the norm of x to x, in kernels, and return it."""
        return self._by_kernels(x, ids, weights, norm=(norm.weight, norm.eps), add_to=x)

    def _by_kernels(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        *,
        norm: tuple[torch.Tensor, float] | None = None,
        add_to: torch.Tensor | None = None,
    ) -> torch.Tensor:
        from cairn.kernels import experts as kernels
        from cairn.kernels.fp8_experts import ExpertScales

        matrices, scales = (self.gate_up, self.down), None
        if self._fp8:
            gate_up, down = self._fp8["gate_up"], self._fp8["down"]
            assert gate_up.scale is not None and down.scale is not None
            matrices = gate_up.values, down.values
            groups = [0 if own.span >= own.shape[-1] else own.span for own in (gate_up, down)]
            scales = ExpertScales(gate_up.scale, groups[0], down.scale, groups[1], self._of_blocks)
        return kernels.experts(
            x, ids, weights, *matrices, scales, count=self._count, norm=norm, add_to=add_to
        )

    @property
    def form(self) -> Hashable:
        """What decides which compiled kernels its products need; None in float."""
        spans = tuple(stack.span for stack in self._fp8.values())
        return (*spans, self._of_blocks) if spans else None

    @property
    def quantised_bytes(self) -> int:
        of_fp8 = (
            s.values.nbytes + s.scale.nbytes for s in self._fp8.values() if s.scale is not None
        )
        return sum(of_fp8) + (0 if self._kept is None else self._kept.nbytes)

    def quantize(self, rounding: Rounding) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Round the weights, if their widths allow. Yields each matrix before and after."""
        if not self._rounds_to(rounding):
            return
        self._any_float = False
        floats = {"gate_up_proj": self.gate_up, "down_proj": self.down}
        if self._fused:
            for part, stack in floats.items():
                yield from self._quantize_stack(part, stack, rounding)
            return
        pairs = []
        for expert in range(self._own):
            before = [stack[expert] for stack in floats.values()]
            after = [rounding.round(matrix) for matrix in before]
            for wide, rounded in zip(before, after, strict=True):
                yield wide, rounded.dense()
            gate_up, down = (Stack([rounded], self._cpu) for rounded in after)
            pairs.append((gate_up, down))
        self._keep_all(pairs)

    def _rounds_to(self, rounding: Rounding) -> bool:
        """Whether its widths allow a rounding."""
        if self._hidden % rounding.columns or self._inter % rounding.columns:
            return False
        if self._fused and rounding.name != "fp8":
            raise ConfigError(
                f"quantization={rounding.name} has no kernel for experts on {self._device.type}; "
                "use fp8 or none"
            )
        return True

    def draw(self, rounding: Rounding, std: float, generator: torch.Generator) -> bool:
        """Random weights for kernels, as `quantize` would make them; returns whether the widths
        allow it."""
        assert self._fused
        fits = self._rounds_to(rounding)
        if fits:
            for name in ("gate_up", "down"):
                drawn = rounding.draw(tuple(getattr(self, name).shape), std, generator)
                assert isinstance(drawn, Narrow)
                self._fp8[name] = drawn
                setattr(self, name, getattr(self, name).new_empty(0, device=self._device))
        return fits

    def _quantize_stack(
        self, part: str, stack: torch.Tensor, rounding: Rounding
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Round several experts at once: on a GPU, launches would take longer than the work."""
        _, outputs, columns = stack.shape
        many = max(1, MOST_ROUNDED // (outputs * columns))
        for first in range(0, len(stack), many):
            some = stack[first : first + many]
            before = some.flatten(0, 1)
            rounded = rounding.round(before)
            yield before, rounded.dense()
            for i in range(len(some)):
                self._keep(first + i, part, rounded.narrow(0, i * outputs, outputs))

    def _keep_all(self, pairs: list[tuple[Stack, Stack]]) -> None:
        self._kept = KeptExperts(pairs, self._cpu)
        self.gate_up = self.down = self.gate_up.new_empty(0)

    def _keep(self, expert: int, part: str, matrix: Kept) -> None:
        """Keep one matrix of an expert as it is. Once all have come, they replace the weights."""
        if self._fused:
            self._keep_fp8(expert, part, matrix)
            return
        parts = self._parts.setdefault(expert, {})
        parts[part] = matrix
        if sum(own.shape[0] for own in parts.values()) < 2 * self._inter + self._hidden:
            return
        del self._parts[expert]
        down = parts.pop("down_proj")
        gate_up = [parts[name] for name in sorted(parts)]  # gate_proj and up_proj, or both in one
        self._pairs[expert] = Stack(gate_up, self._cpu), Stack([down], self._cpu)
        if len(self._pairs) == self._own:
            self._keep_all([self._pairs.pop(e) for e in range(self._own)])

    def _keep_fp8(self, expert: int, part: str, matrix: Kept) -> None:
        """Keep one matrix of an expert in FP8; other types become float."""
        rows = self._rows(part)
        widths = self._hidden % 16 == 0 and self._inter % 16 == 0
        if not (isinstance(matrix, Narrow) and readable(matrix) and widths):
            self._write(expert, rows, matrix.dense())
            return
        if self._any_float:
            raise LoadError(_MIXED)
        assert matrix.scale is not None
        name = "down" if rows is None else "gate_up"
        whole = self._fp8.get(name)
        if whole is None:
            shape = getattr(self, name).shape
            values = torch.empty(shape, dtype=matrix.values.dtype, device=self._device)
            scale = torch.empty(*shape[:2], matrix.scale.shape[1], device=self._device)
            whole = self._fp8[name] = Narrow(values, scale, matrix.span)
            setattr(self, name, getattr(self, name).new_empty(0, device=self._device))
        if whole.span != matrix.span:
            raise LoadError("FP8 experts of one layer have scales for different numbers of columns")
        assert whole.scale is not None
        if self._of_blocks and matrix.scale.shape[1] > 1:
            self._of_blocks = of_blocks(matrix.scale)
        at = slice(None) if rows is None else rows
        whole.values[expert, at].copy_(matrix.values)
        whole.scale[expert, at].copy_(matrix.scale)

    def _rows(self, part: str) -> slice | None:
        """The rows of a part in gate_up; None for down."""
        inter = self._inter
        ends = {"gate_proj": (0, inter), "up_proj": (inter, 2 * inter), "gate_up_proj": (0, None)}
        return slice(*ends[part]) if part in ends else None

    def slots(self, name: str) -> Iterator[tuple[str, TensorSlot]]:
        hidden, inter = self._hidden, self._inter
        for expert in range(self._count):
            local = expert - self.first
            own = 0 <= local < self._own
            for part, shape in (
                ("gate_proj", (inter, hidden)),
                ("up_proj", (inter, hidden)),
                ("down_proj", (hidden, inter)),
            ):
                slot = TensorSlot(shape, _leave, keep=_leave if self._keeps else None)
                if own:
                    keep = partial(self._keep, local, part) if self._keeps else None
                    slot = TensorSlot(
                        shape, partial(self._write, local, self._rows(part)), keep=keep
                    )
                yield f"{name}.{expert}.{part}.weight", slot

    def _write(self, expert: int, rows: slice | None, tensor: torch.Tensor) -> None:
        """`rows` of gate_up; None for down."""
        if self._fp8:
            raise LoadError(_MIXED)
        self._any_float = True
        if self.gate_up.is_meta:
            self.gate_up, self.down = (
                torch.empty_like(own, device=self._device) for own in (self.gate_up, self.down)
            )
        target = self.down[expert] if rows is None else self.gate_up[expert, rows]
        target.copy_(tensor)

    def joint_slots(self, name: str) -> Iterator[tuple[str, TensorSlot, tuple[str, ...]]]:
        for part, parts, shape in (
            ("gate_up_proj", ("gate_proj", "up_proj"), (2 * self._inter, self._hidden)),
            ("down_proj", ("down_proj",), (self._hidden, self._inter)),
        ):
            slot = TensorSlot((self._count, *shape), partial(self._write_joint, part))
            apart = (f"{name}.{e}.{own}.weight" for e in range(self._count) for own in parts)
            yield f"{name}.{part}", slot, tuple(apart)

    def _write_joint(self, part: str, whole: torch.Tensor) -> None:
        for expert, matrix in enumerate(whole[self.first : self.first + self._own]):
            if self._keeps:
                self._keep(expert, part, Narrow.of(matrix))
            else:
                self._write(expert, self._rows(part), matrix)


def _leave(tensor: object) -> None:
    """For tensors of experts that are on another rank."""


def row_rungs(model: Module) -> set[int]:
    """Row counts at which the experts of a model switch to other compiled kernels."""
    return {
        rung
        for _, module in model.named_modules()
        if isinstance(module, ExpertFeedForward)
        for rung in module.experts.row_rungs(module.per_token)
    }


class ExpertFeedForward(FeedForward):
    """The chosen experts, and an MLP that every row passes through if `shared` is not 0."""

    def __init__(
        self,
        spec: DecoderSpec,
        layer: int,
        factory: Factory,
        routing: Routing,
        *,
        inter: int,
        shared: int = 0,
        wide_router: bool = False,
    ) -> None:
        """`inter` is the width of an expert, `shared` that of the MLP."""
        hidden = spec.dims.hidden_size
        self.per_token = routing.per_token
        self.gate = Router(hidden, routing, factory, wide=wide_router)
        self.experts = ExpertWeights(hidden, inter, routing.experts, factory)
        self.shared_experts: MLP | None = None
        if shared:
            own = share("the width of shared experts", shared, factory.parallel.size)
            self.shared_experts = MLP(spec, layer, factory, width=own)
        self._parallel = factory.parallel
        self._fused = factory.fused

    def add_normed(self, x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        if not self._fused:
            return super().add_normed(x, norm)
        if self.shared_experts is None:
            weights, ids = self.gate(x, norm=norm)
            return self.experts.add_normed(x, norm, ids, weights)
        normed = norm(x)
        weights, ids = self.gate(normed)
        x = self.shared_experts.own_part(normed, add_to=x)
        return self.experts(normed, ids, weights, add_to=x)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.gate(x)
        shared = None if self.shared_experts is None else self.shared_experts.own_part(x)
        return self._parallel.sum(self.experts(x, ids, weights, add_to=shared))
