"""`cairn bench dsa`: attention of one layer with an index, for new rows or for a whole prompt, and
whole decode steps, beside the dense twin. On CUDA also the parts of a decode layer, beside other
kernels and beside their floors, and decode steps with a host tier (`dsa_tier`)."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from cairn.attention.backend import AttentionShape, DenseBackend, SparseParts, resolve_backends
from cairn.attention.batch import AttentionBatch, IndexQuery
from cairn.attention.dsa_backend import DSABackend
from cairn.attention.flash_mla_rows import FlashRows
from cairn.attention.latent import LatentHeads
from cairn.bench.attention import fill, read_bandwidth, time_cuda
from cairn.bench.dsa_tier import tier_steps
from cairn.bench.engines import measured, need_cuda
from cairn.bench.report import show_rows, tell
from cairn.cli_flags import check_at_least
from cairn.engine.inputs import StepInputs
from cairn.engine.resolve import resolve_device
from cairn.errors import ConfigError
from cairn.kernels.fp8_rows import CACHE_TYPES
from cairn.kernels.packing import table_width
from cairn.memory.groups import group_layers
from cairn.memory.kv_pool import KVPool
from cairn.memory.layout import INDEX, LATENT, CacheLayout
from cairn.models.presets import PRESETS
from cairn.sparsity.config import SparseConfig
from cairn.sparsity.policy import Policy

Rows = Iterator[dict[str, Any]]
Call = Callable[[], Any]
_PAGE = 64
_PRODUCTS = 790e12  # products and sums of 16 bits that an H200 computes in a second, at best
_CHUNK = 2048  # rows of a prompt that are computed at once
_REPEAT = 3, 20  # runs of new rows, on a CPU and on CUDA
_SETS = 4  # calls of one timed run: each reads other rows, not what the cache still has


def command(arguments: argparse.Namespace) -> int:
    names = [name for name in PRESETS if "index_topk" in PRESETS[name]]
    if arguments.model not in names:
        raise ConfigError(f"model is {arguments.model!r}; bench dsa has {', '.join(names)}")
    check_at_least(arguments, 1, "new_rows")
    with torch.inference_mode():
        show_rows("dsa", tell(_run(arguments)), arguments.output)
    return 0


def _run(arguments: argparse.Namespace) -> Rows:
    device, new = resolve_device(arguments.device), arguments.new_rows
    preset = dict(PRESETS[arguments.model])
    if arguments.topk is not None:
        preset["index_topk"] = arguments.topk
    if "tier" in arguments.parts:
        need_cuda("dsa --parts tier", arguments.device)
    cache = CACHE_TYPES.get(arguments.kv_cache_dtype)
    if cache is not None and (others := {"step", "tier"}.intersection(arguments.parts)):
        raise ConfigError(
            f"--kv-cache-dtype is {arguments.kv_cache_dtype!r}, which bench dsa has for the parts "
            f"layer and prefill; leave {' and '.join(sorted(others))} out"
        )
    sizes = [(length, seqs) for length in arguments.lengths for seqs in arguments.batches]
    bandwidth = read_bandwidth(device) if device.type == "cuda" else 0.0
    for length, seqs in sizes if "layer" in arguments.parts else ():
        layer = Layer(preset, device, length, seqs, new, cache)
        row: dict[str, Any] = {"length": length, "sequences": seqs, "new_rows": new}
        yield {**row, **layer.whole()}
        if device.type == "cuda" and new == 1:
            yield {**row, **layer.parts(bandwidth)}
        del layer
    if "prefill" in arguments.parts:
        yield from _prefills(preset, device, sorted(arguments.lengths), cache)
    if "step" in arguments.parts:
        yield from _steps(arguments.model, sizes, device)
    for length, seqs in sizes if "tier" in arguments.parts else ():
        own = arguments.model, arguments.contexts, seqs, length, arguments.changed
        yield from tier_steps(*own, device)


@dataclass(frozen=True, slots=True)
class _Sizes:
    heads: int
    nope: int
    rope: int
    value: int
    latent: int
    index_heads: int
    index_width: int
    topk: int

    @classmethod
    def of(cls, preset: Mapping[str, Any]) -> _Sizes:
        heads = ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        index = ("index_n_heads", "index_head_dim", "index_topk")
        return cls(*(preset[name] for name in (*heads, "kv_lora_rank", *index)))


class Layer:
    """One layer whose sequences have `new` new rows each, and its dense twin."""

    def __init__(
        self,
        preset: Mapping[str, Any],
        device: torch.device,
        length: int,
        seqs: int,
        new: int,
        cache: torch.dtype | None = None,
    ) -> None:
        """`cache` is the type of the cache, if it is not that of queries."""
        self._sizes = own = _Sizes.of(preset)
        self._device, self._length, self._rows = device, length, seqs * new
        self._repeat = _REPEAT[device.type == "cuda"] if new == 1 else 1
        self._dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        width = own.latent + own.rope
        self._layout = layout = CacheLayout.of_latents(width, own.index_width).of_type(
            cache or self._dtype
        )
        groups = group_layers([None], [layout])
        per_seq = -(-length // _PAGE)
        self._pool = KVPool(groups, [seqs * per_seq], _PAGE, device)
        fill(self._pool, layout)
        batch = _batch(device, seqs, new, length)
        shape = AttentionShape(
            *(own.heads, 1, width, (own.nope + own.rope) ** -0.5, _PAGE),
            *(self._dtype, device, groups, seqs),
            value_dim=own.latent,
            longest=per_seq * _PAGE,
        )
        kinds, _ = resolve_backends(("auto",), shape)
        self._dense: DenseBackend = kinds[0 if new > 1 else -1](shape, self._pool)
        config = SparseConfig(
            None, (0,), own.topk, 1, Policy.strategy, Policy.fusion, dense_below=own.topk
        )
        parts = SparseParts(
            shape=shape, pool=self._pool, config=config, max_pages=per_seq, dense=self._dense
        )
        self._sparse = DSABackend(parts)
        self._by_index, self._whole = self._sparse.prepare(batch), self._dense.prepare(batch)
        self._sparse.begin(self._by_index)
        self._dense.begin(self._whole)
        self._heads = LatentHeads(
            self._draw(own.heads, own.nope, own.latent),
            self._draw(own.heads, own.latent, own.value),
        )
        self._query = self._draw(self._rows, own.heads, own.nope + own.rope)

    def _draw(self, *sizes: int) -> torch.Tensor:
        return torch.randn(sizes, dtype=self._dtype, device=self._device)

    def _index(self) -> IndexQuery:
        own, rows = self._sizes, self._rows
        return IndexQuery(
            self._draw(rows, own.index_heads, own.index_width),
            self._draw(rows, own.index_heads).float(),
            self._draw(rows, own.index_width),
        )

    def whole(self) -> dict[str, Any]:
        """With the products before and after attention, by index and densely."""
        seconds = self.seconds()
        row = {f"{name}_ms": round(s * 1e3, 3) for name, s in seconds.items()}
        ratio = round(seconds["dense"] / seconds["dsa"], 2)
        return {**row, "dense_backend": self._dense.name, "dense / dsa": ratio}

    def seconds(self) -> dict[str, float]:
        """Median seconds by index, densely, and in plain torch of selection alone."""
        query, heads, index = self._query, self._heads, self._index()
        calls: dict[str, Call] = {
            "dsa": lambda: self._sparse.forward_indexed(0, query, heads, self._by_index, index),
            "dense": lambda: self._dense.forward_latent(0, query, heads, self._whole),
        }
        if self._sparse._kernels is None:
            select, pieces = self._sparse.select, list(self._by_index.pieces)
            calls["selection"] = lambda: [select(0, p, index, self._by_index) for p in pieces]
        medians = _medians(list(calls.values()), self._device, self._repeat)
        return dict(zip(calls, medians, strict=True))

    def parts(self, bandwidth: float) -> dict[str, Any]:
        """Scan, selection and attention of a decode layer, apart and together."""
        kernels, step = self._sparse._kernels, self._by_index.runs[0].kernels
        if kernels is None or step is None:
            return {"parts": "none: all rows are read densely"}
        own, (tile, *more) = self._sizes, step.tiles
        assert not more, "fewer sequences fit into one tile of scores"
        sets = [self._index() for _ in range(_SETS)]
        slots = [torch.empty_like(step.positions) for _ in sets]
        scores = []
        for index, chosen in zip(sets, slots, strict=True):
            scores.append(kernels.scan(0, step, tile, index).clone())
            kernels.choose(0, step, tile, scores[-1], chosen)
        absorbed = self._heads.absorb(self._query)
        out = absorbed.new_empty(*absorbed.shape[:2], own.latent)
        pool, shape = self._pool.part(0, LATENT), self._sparse._parts.shape
        scale = shape.scale

        def together(index: IndexQuery, chosen: torch.Tensor) -> None:
            kernels.choose(0, step, tile, kernels.scan(0, step, tile, index), chosen)
            kernels.attend(0, absorbed, chosen)

        calls: dict[str, Callable[[int], Any]] = {
            "scan": lambda i: kernels.scan(0, step, tile, sets[i]),
            "select": lambda i: kernels.choose(0, step, tile, scores[i], slots[i]),
            "attend": lambda i: kernels.attend(0, absorbed, slots[i]),
            "together": lambda i: together(sets[i], slots[i]),
            "own attend": lambda i: kernels.read(absorbed, pool, slots[i], out, scale=scale),
            "torch.topk": lambda i: scores[i].topk(own.topk, sorted=False),
            "dense attend": lambda i: self._dense.forward(0, absorbed, self._whole),
        }
        if FlashRows.refusal(shape, own.topk) is None:
            flash = FlashRows(own.heads, self._device)
            calls["FlashMLA sparse"] = lambda i: flash.attend(absorbed, pool, slots[i], scale)
        seconds = {name: _per_set(call) for name, call in calls.items()}
        row: dict[str, Any] = {f"{name}_us": round(s * 1e6, 1) for name, s in seconds.items()}
        width = own.latent + own.rope
        key_bytes, row_bytes = (
            self._layout.part(name).page_bytes(_PAGE) / _PAGE for name in (INDEX, LATENT)
        )
        scanned = self._rows * self._length * key_bytes / bandwidth
        read = self._rows * own.topk * row_bytes / bandwidth
        products = 2.0 * self._rows * own.topk * own.heads * (width + own.latent) / _PRODUCTS
        floor = scanned + max(read, products)
        row |= {"scan floor_us": round(scanned * 1e6, 1), "floor_us": round(floor * 1e6, 1)}
        row["share of floor"] = round(floor / seconds["together"], 2)
        row["dense / dsa"] = round(seconds["dense attend"] / seconds["together"], 2)
        row["topk / select"] = round(seconds["torch.topk"] / seconds["select"], 2)
        if "FlashMLA sparse" in seconds:
            for name in ("attend", "own attend"):
                ratio = seconds["FlashMLA sparse"] / seconds[name]
                row[f"FlashMLA / {name}"] = round(ratio, 2)
        return row


def _batch(device: torch.device, seqs: int, new: int, length: int) -> AttentionBatch:
    """Sequences of one length, whose pages are scattered."""
    return _inputs(device, seqs, new, length).batch


def _inputs(device: torch.device, seqs: int, new: int, length: int, groups: int = 1) -> StepInputs:
    per_seq = -(-length // _PAGE)
    order = 1 + np.random.default_rng(0).permutation(seqs * per_seq)
    table = np.zeros((seqs, table_width(per_seq)), dtype=np.int32)
    table[:, :per_seq] = order.reshape(seqs, per_seq)
    sizes = np.full(seqs, new), np.full(seqs, length)
    return StepInputs.made_up(_PAGE, *sizes, [table] * groups).send(device, True)


def _prefills(
    preset: Mapping[str, Any],
    device: torch.device,
    lengths: Sequence[int],
    cache: torch.dtype | None,
) -> Rows:
    """Attention of one layer for whole prompts, chunk by chunk; longer ones go on where the one
    before ended."""
    totals: dict[str, float] = {}
    end = 0
    for length in lengths:
        while end < length:
            begin, end = end, min(end + _CHUNK, length)
            layer = Layer(preset, device, end, 1, end - begin, cache)
            for name, own in layer.seconds().items():
                totals[name] = totals.get(name, 0.0) + own
        row: dict[str, Any] = {"prompt": length, "chunk": min(_CHUNK, length)}
        row |= {f"{name}_ms": round(own * 1e3, 3) for name, own in totals.items()}
        yield {**row, "dense / dsa": round(totals["dense"] / totals["dsa"], 2)}


def _steps(model: str, sizes: Sequence[tuple[int, int]], device: torch.device) -> Rows:
    """Whole decode steps with random weights, over a cache of random rows, by index and densely."""
    by_index, whole = (_step_seconds(model, sizes, device, dense=dense) for dense in (False, True))
    for (length, seqs), ours, twin in zip(sizes, by_index, whole, strict=True):
        yield {
            "what": f"decode step of {model}",
            "length": length,
            "sequences": seqs,
            "dsa_ms": round(ours * 1e3, 3),
            "dense_ms": round(twin * 1e3, 3),
            "dense / dsa": round(twin / ours, 2),
        }


def _step_seconds(
    model: str, sizes: Sequence[tuple[int, int]], device: torch.device, *, dense: bool
) -> list[float]:
    """Seconds of a step of each size. Nothing refers to the engine afterwards, since there may not
    be memory for two."""
    most = max(seqs for _, seqs in sizes)
    pages = most + max(seqs * -(-length // _PAGE) for length, seqs in sizes)
    own, layers = _Sizes.of(PRESETS[model]), PRESETS[model]["num_hidden_layers"]
    cuda = device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    row_bytes = dtype.itemsize * layers * (own.latent + own.rope + own.index_width)
    # On CUDA each step is recorded below, at its own length.
    options = {"disable_cuda_graph": True} if cuda else {}
    with measured(
        model=model,
        load_format="dummy",
        dtype=str(dtype).removeprefix("torch."),
        device=device.type,
        page_size=_PAGE,
        max_running_requests=most,
        kv_cache_gib=pages * _PAGE * row_bytes / 2**30,
        disable_dsa=dense,
        **options,
    ) as llm:
        runner, times = llm.engine.runner, []
        for tensor in runner.stepper.pool.tensors():
            assert len(tensor) > pages - most, "the cache holds the largest step"
            tensor.normal_()
        for length, seqs in sizes:
            inputs = _inputs(runner.stepper.device, seqs, 1, length, len(runner.tables.pages))
            metadata = runner.stepper.backend.prepare(inputs.batch)
            call = partial(runner.stepper.forward, inputs, metadata, None)
            times += _medians([call], device, _REPEAT[cuda])
    return times


def _per_set(call: Callable[[int], Any]) -> float:
    """Median seconds of a call, on CUDA."""
    return time_cuda(lambda: [call(i) for i in range(_SETS)]) / _SETS


def _medians(calls: Sequence[Call], device: torch.device, repeat: int) -> list[float]:
    """Median seconds of each call; on a CPU in turn, so that all meet the same machine."""
    if device.type == "cuda":
        return [time_cuda(call, repeat) for call in calls]
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeat):
        for own, call in zip(times, calls, strict=True):
            begin = time.perf_counter()
            call()
            own.append(time.perf_counter() - begin)
    return [median(own) for own in times]
