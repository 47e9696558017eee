"""A step of one sparse layer with random contents, for the kernels and for their reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from cairn.attention.backend import AttentionShape, SparseParts
from cairn.attention.batch import Scoring, unit_ids
from cairn.attention.hsa.backend import HSABackend
from cairn.attention.torch_backend import TorchBackend
from cairn.engine.inputs import StepInputs
from cairn.kernels.cpu import CpuKernels
from cairn.kernels.fp8_rows import FP8
from cairn.memory.groups import group_layers
from cairn.memory.kv_pool import KVPool
from cairn.memory.landmarks import LandmarkPool, LandmarkShape
from cairn.memory.layout import CacheLayout
from cairn.sparsity.config import ALL_ROWS, SparseConfig
from cairn.sparsity.policy import Landmark, Policy, PolicyShape
from cairn.sparsity.quest import QuestPolicy
from cairn.sparsity.registry import make_policy
from cairn.sparsity.selection import Selection
from cairn.sparsity.spread import SpreadPolicy
from tests.helpers import fill_with_nan


class MaxKey(Policy):
    """A user's policy: no kernel makes its landmarks."""

    def landmark(self, keys: torch.Tensor, prior: torch.Tensor | None) -> Landmark:
        return Landmark(keys.amax(1), None)


class KeysAlone(MaxKey):
    """A policy for models without landmark rows, which have no prior."""

    def landmark(self, keys: torch.Tensor, prior: torch.Tensor | None) -> Landmark:
        assert prior is None
        return super().landmark(keys, prior)


class HalfBox(QuestPolicy):
    """A user's change of a policy that has a kernel, which must not be used then."""

    def landmark(self, keys: torch.Tensor, prior: torch.Tensor | None) -> Landmark:
        vectors, _ = super().landmark(keys, prior)
        return Landmark(vectors * 0.5, None)


class OwnSpread(SpreadPolicy):
    """A user's policy with deviations: kernels score its landmarks with its own queries."""

    reach = 1.0

    def map_query(self, query: torch.Tensor) -> torch.Tensor:
        return super().map_query(query) * 2


@dataclass(frozen=True)
class Case:
    new: Sequence[int]
    total: Sequence[int]
    policy: str = "hils"
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    page_size: int = 16
    topk: int = 3
    window: int = 20
    options: dict[str, Any] = field(default_factory=dict)
    traced: Sequence[int] = ()
    dtype: torch.dtype = torch.float32
    cache: torch.dtype | None = None  # dtype
    prompt: Sequence[int] | None = None
    units: int = 1
    stale: bool = False  # every third landmark belongs to another generation of its page


@dataclass(frozen=True)
class Result:
    out: torch.Tensor
    vectors: torch.Tensor
    sealed: torch.Tensor
    selections: dict[int, Selection]
    backend: HSABackend


def run(
    case: Case,
    device: torch.device,
    *,
    kernels: bool,
    seed: int = 0,
    cpu: CpuKernels | None = None,
) -> Result:
    torch.manual_seed(seed)
    new, total = np.array(case.new), np.array(case.total)
    counts = -(-total // case.page_size)
    pages = int(counts.sum()) + 4
    layout = CacheLayout.of_heads(case.kv_heads, case.dim, case.cache or case.dtype)
    groups = group_layers([None], [layout])
    scale = case.dim**-0.5
    shape = AttentionShape(
        case.heads,
        case.kv_heads,
        case.dim,
        scale,
        case.page_size,
        case.dtype,
        device,
        groups,
        len(new),
        cpu=cpu,
    )
    policy = make_policy(case.policy, PolicyShape(case.heads, case.kv_heads, case.dim, scale))
    native = policy.needs_landmark_rows
    config = SparseConfig(
        policy,
        (0,),
        case.topk,
        case.window,
        case.options.get("strategy", policy.strategy),
        case.options.get("fusion", policy.fusion),
        sinks=case.options.get("sinks", 0),
        units=case.units,
        null_split=case.options.get("null_split", native),
        landmark_rows=native,
        dense_below=case.options.get("dense_below", 0),
        dense_prompt_below=case.options.get("dense_prompt_below", 0),
    )
    pool = KVPool(groups, [pages], case.page_size, device)
    landmark_shape = LandmarkShape(
        (0,),
        policy.landmark_heads,
        policy.landmark_width,
        policy.has_bias,
        case.dtype,
        case.units,
    )
    landmarks = LandmarkPool(landmark_shape, pages, device)
    for tensor in (pool.part(0), *landmarks.vectors.values(), *landmarks.biases.values()):
        fill_with_nan(tensor)
    order = 1 + np.random.default_rng(seed).permutation(pages)
    table = np.zeros((len(new), int(counts.max())), dtype=np.int32)
    past = total - new
    for s, count in enumerate(counts):
        table[s, :count] = order[:count]
        order = order[count:]
        rows = torch.randn(2 * case.kv_heads, int(total[s]), case.dim).to(case.dtype)
        for i in range(count):
            held = rows[:, i * case.page_size : (i + 1) * case.page_size].to(device)
            # The reference multiplies what it masks; the kernels do not touch it.
            page = pool.part(0)[int(table[s, i])].view(torch.uint8)
            by_kernels = kernels or (cpu is not None and new.max() == 1)
            page.fill_(0xFF if by_kernels and not config.reads_densely else 0)  # NaN or 0
            offsets = torch.arange(held.shape[1], device=device)
            places = torch.full_like(offsets, int(table[s, i]))
            pool.write(0, places, offsets, held.transpose(0, 1))
        complete = np.arange(past[s] // (case.page_size // case.units))
        sealed = unit_ids(table, s, complete, case.units)
        prior = torch.randn(len(sealed), case.heads, case.dim).to(case.dtype).to(device)
        if len(sealed):
            index = torch.from_numpy(sealed).to(device)
            landmarks.seal(sealed, np.ones_like(sealed))
            keys = pool.read_keys(0, index, case.dtype, case.units)
            landmarks.save(0, index, *policy.landmark(keys, prior))
            if case.stale:
                landmarks.sealed[index[::3]] = 7
                landmarks.vectors[0][index[::3]] = float("nan")
    inputs = StepInputs.made_up(
        case.page_size,
        new,
        total,
        [table],
        prompt_rows=np.zeros_like(total) if case.prompt is None else np.array(case.prompt),
        traced_rows=case.traced,
    )
    batch = inputs.send(device, True).batch
    dense = TorchBackend(shape, pool)
    parts = SparseParts(
        shape=shape,
        pool=pool,
        config=config,
        max_pages=table.shape[1] + 3,
        dense=dense,
        landmarks=landmarks,
    )
    backend = HSABackend(parts, kernels=kernels)
    size = (int(new.sum()), case.heads, case.dim)
    query, scores_with = (torch.randn(size).to(case.dtype).to(device) for _ in range(2))
    scoring = Scoring(scores_with, scores_with) if native else None
    contents = pool.part(0).clone()
    backend.launching(batch, None)
    metadata = backend.prepare(batch)
    pool.part(0).copy_(contents)  # the step's rows are written after it was prepared
    backend.begin(metadata)
    out = backend.forward(0, query, metadata, scoring)
    told = {row: backend.selections(metadata, row)[0] for row in case.traced}
    mine = torch.from_numpy(np.unique(table[..., None] * case.units + np.arange(case.units)))
    mine = mine.long().to(device)
    return Result(out, landmarks.vectors[0][mine], landmarks.sealed, told, backend)


DECODE = ([1, 1, 1, 1, 1, 1], [1, 16, 37, 100, 160, 411])
CHUNKS = ([5, 70, 33, 16], [5, 70, 133, 416])
MIXED = ([1, 40, 1, 1, 65], [48, 40, 33, 300, 365])
SHORT = ([1, 33], [300, 133])  # a row and a prompt of several tiles, for other options

CASES: dict[str, Case] = {
    "decode": Case(*DECODE, traced=[3, 5]),
    "chunks": Case(*CHUNKS, traced=[4, 107]),
    "mixed": Case(*MIXED, traced=[0, 43]),
    "decode-page-completed": Case([1, 1], [160, 64], traced=[0]),
    "wide-group": Case(*SHORT, heads=8, kv_heads=1),
    "no-groups": Case(*SHORT, heads=2, kv_heads=2),
    "landmark-key": Case(*SHORT, policy="landmark-key"),
    "quest": Case(*SHORT, policy="quest", traced=[0, 20]),
    "quest-chunks": Case([5, 33], [5, 133], policy="quest", options={"sinks": 1}),
    "quest-decode": Case(*DECODE, policy="quest", options={"sinks": 2}),
    "spread": Case(*MIXED, policy="spread", page_size=8, topk=11, traced=[0, 42]),
    "spread-chunks": Case(*CHUNKS, policy="spread", page_size=8, topk=9, options={"sinks": 1}),
    "spread-decode": Case(*DECODE, policy="spread", page_size=8, topk=19, traced=[3, 5]),
    "spread-16": Case(*SHORT, policy="spread"),
    "spread-no-groups": Case(*SHORT, policy="spread", heads=2, kv_heads=2),
    "own-spread": Case(*SHORT, policy="tests.kernels.sparse_case:OwnSpread", page_size=8),
    "mean": Case(*SHORT, policy="mean"),
    "mean-by-sum": Case(*SHORT, policy="mean", options={"strategy": "group"}),
    "mean-by-best": Case(*SHORT, policy="mean", options={"strategy": "head"}),
    "mean-decode": Case(*DECODE, policy="mean"),
    "hils-by-lse": Case(*SHORT, options={"fusion": "lse"}),
    "no-null-split": Case(*SHORT, options={"null_split": False}),
    "dense-below": Case(
        [1, 1, 5, 20],
        [48, 365, 5, 340],
        policy="quest",
        options={"dense_below": 320},
        traced=[0],
    ),
    "dense-prompt": Case(
        [1, 40, 1, 30],
        [48, 40, 300, 130],
        policy="quest",
        options={"dense_prompt_below": ALL_ROWS},
        prompt=[20, 40, 300, 110],
    ),
    "own-policy": Case(*SHORT, policy="tests.kernels.sparse_case:MaxKey"),
    "own-policy-decode": Case([1, 1], [160, 83], policy="tests.kernels.sparse_case:MaxKey"),
    "changed-policy": Case([1, 1], [160, 83], policy="tests.kernels.sparse_case:HalfBox"),
    "many-pages": Case([1, 20], [900, 900], topk=5),
    "many-of-many": Case([1, 20], [900, 1200], topk=16, traced=[20]),
    "seven-heads": Case([1, 20], [300, 300], heads=14, kv_heads=2, policy="mean"),
    "page-64": Case([1, 70], [700, 500], page_size=64, topk=2, window=100),
    "topk-over-pages": Case(*SHORT, topk=40),
    "fp8": Case([1, 40, 1], [48, 140, 300], traced=[0, 40], cache=FP8),
    "fp8-by-lse": Case([5, 33], [5, 133], options={"fusion": "lse"}, cache=FP8),
    "fp8-quest-decode": Case(*DECODE, policy="quest", options={"sinks": 2}, cache=FP8),
    "fp8-half": Case(*DECODE, cache=FP8, dtype=torch.float16),
    "fp8-landmark-key": Case([1, 1], [160, 64], policy="landmark-key", cache=FP8),
    "fp8-mean": Case([1, 20], [704, 400], policy="mean", page_size=64, topk=2, cache=FP8),
    "fp8-spread": Case([1, 40, 1], [48, 140, 300], policy="spread", page_size=8, cache=FP8),
    "fp8-spread-half": Case(
        *DECODE, policy="spread", dim=32, page_size=8, topk=11, cache=FP8, dtype=torch.float16
    ),
    "int8": Case([1, 40, 1], [48, 140, 300], cache=torch.int8),
}
