"""`cairn bench dsa`: attention of one layer with an index, beside its dense twin, at the sizes of
DeepSeek-V3.2."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch

from cairn.attention.backend import AttentionShape, SparseParts, resolve_backends
from cairn.attention.batch import IndexQuery
from cairn.attention.dsa_backend import DSABackend
from cairn.attention.latent import LatentHeads
from cairn.bench.attention import time_cuda
from cairn.bench.report import show_rows, tell
from cairn.cli_flags import check_at_least
from cairn.engine.inputs import StepInputs
from cairn.engine.resolve import resolve_device
from cairn.memory.groups import group_layers
from cairn.memory.kv_pool import KVPool
from cairn.memory.layout import CacheLayout
from cairn.sparsity.config import SparseConfig
from cairn.sparsity.policy import Policy

_PAGE = 64
_HEADS, _NOPE, _ROPE, _VALUE, _LATENT = 128, 128, 64, 128, 512
_INDEX_HEADS, _INDEX_WIDTH = 64, 128


def command(arguments: argparse.Namespace) -> int:
    check_at_least(arguments, 1, "new_rows", "topk")
    device, sizes = resolve_device(arguments.device), (arguments.lengths, arguments.batches)
    with torch.inference_mode():
        rows = tell(_run(device, *sizes, arguments.new_rows, arguments.topk))
    show_rows("dsa", rows, arguments.output)
    return 0


def _run(
    device: torch.device, lengths: Sequence[int], batches: Sequence[int], new: int, topk: int
) -> Iterator[dict[str, Any]]:
    for length in lengths:
        for seqs in batches:
            calls = _calls(device, length, seqs, new, topk)
            seconds = _medians(list(calls.values()), device, 3 if new == 1 else 1)
            row: dict[str, Any] = {"length": length, "sequences": seqs, "new_rows": new}
            row |= {f"{name}_ms": round(s * 1e3, 2) for name, s in zip(calls, seconds, strict=True)}
            yield {**row, "dense / dsa": round(seconds[1] / seconds[0], 2)}


def _calls(
    device: torch.device, length: int, seqs: int, new: int, topk: int
) -> dict[str, Callable[[], Any]]:
    """Attention of `seqs` sequences with `new` new rows each, by index and densely."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    layout = CacheLayout.of_latents(_LATENT + _ROPE, _INDEX_WIDTH).of_type(dtype)
    groups = group_layers([None], [layout])
    per_seq = -(-length // _PAGE)
    pool = KVPool(groups, [seqs * per_seq], _PAGE, device)
    for tensor in pool.tensors():
        tensor.normal_()
    order = 1 + np.random.default_rng(0).permutation(seqs * per_seq)
    table = order.reshape(seqs, per_seq).astype(np.int32)
    made = StepInputs.made_up(_PAGE, np.full(seqs, new), np.full(seqs, length), [table])
    batch = made.send(device, True).batch
    scale, width = (_NOPE + _ROPE) ** -0.5, _LATENT + _ROPE
    shape = AttentionShape(
        _HEADS, 1, width, scale, _PAGE, dtype, device, groups, seqs, value_dim=_LATENT
    )
    (kind, *_), _ = resolve_backends(("auto",), shape)
    dense = kind(shape, pool)
    config = SparseConfig(None, (0,), topk, 1, Policy.strategy, Policy.fusion, dense_below=topk)
    parts = SparseParts(shape=shape, pool=pool, config=config, max_pages=per_seq, dense=dense)
    sparse = DSABackend(parts)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, dtype=dtype, device=device)

    rows = seqs * new
    query = random(rows, _HEADS, _NOPE + _ROPE)
    heads = LatentHeads(random(_HEADS, _NOPE, _LATENT), random(_HEADS, _LATENT, _VALUE))
    index = IndexQuery(
        random(rows, _INDEX_HEADS, _INDEX_WIDTH),
        random(rows, _INDEX_HEADS).float(),
        random(rows, _INDEX_WIDTH),
    )
    by_index, whole = sparse.prepare(batch), dense.prepare(batch)
    sparse.begin(by_index)
    dense.begin(whole)
    return {
        "dsa": lambda: sparse.forward_indexed(0, query, heads, by_index, index),
        "dense": lambda: dense.forward_latent(0, query, heads, whole),
        "selection": lambda: [sparse.select(0, p, index, by_index) for p in by_index.pieces],
    }


def _medians(calls: Sequence[Callable[[], Any]], device: torch.device, repeat: int) -> list[float]:
    """Median seconds of each call; on a CPU in turn, so that all meet the same machine."""
    if device.type == "cuda":
        return [time_cuda(call) for call in calls]
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeat):
        for own, call in zip(times, calls, strict=True):
            begin = time.perf_counter()
            call()
            own.append(time.perf_counter() - begin)
    return [median(own) for own in times]
