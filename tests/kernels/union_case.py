"""Attention over unions of made-up selections, and what it must give."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from cairn.kernels.paged_extend import ExtendBlocks
from cairn.kernels.sparse_extend import attend_selected, union_rows
from cairn.kernels.sparse_shape import SparseShape
from cairn.kernels.union_attention import UnionAttention
from cairn.kernels.workspace import Workspace

SHAPE = SparseShape(
    heads=16,
    kv_heads=2,
    head_dim=64,
    page_size=64,
    landmark_heads=16,
    landmark_width=64,
    topk=4,
    window=512,
    scale=0.125,
    strategy="softmax_head",
    by_lse=False,
    sinks=0,
    null_split=True,
    hide_last=True,
)

UNION_SHAPES = {
    "hils": SHAPE,
    "no-null-split": replace(SHAPE, null_split=False, hide_last=False),
    "by-lse": replace(SHAPE, by_lse=True, null_split=False, hide_last=False),
    "unbounded": replace(SHAPE, strategy="group"),
    "group-4": replace(SHAPE, heads=8, landmark_heads=8),
    "group-2": replace(SHAPE, heads=4, landmark_heads=4),
    "no-groups": replace(SHAPE, heads=2, landmark_heads=2),
    "landmarks-of-kv-heads": replace(SHAPE, landmark_heads=2),
    "head-128": replace(SHAPE, head_dim=128, landmark_width=128, scale=128**-0.5),
}


@dataclass(frozen=True)
class UnionCase:
    shape: SparseShape
    selected: torch.Tensor
    query: torch.Tensor
    scoring: torch.Tensor
    pool: torch.Tensor
    vectors: torch.Tensor
    bias: torch.Tensor | None
    page_table: torch.Tensor
    cu_query: torch.Tensor
    query_lens: np.ndarray
    window_out: torch.Tensor
    window_lse: torch.Tensor
    normalizer: torch.Tensor | None

    def blocks(self, rows: int) -> ExtendBlocks:
        """As recorded steps have them: with surplus blocks, which come first."""
        lens = torch.from_numpy(self.query_lens).to(self.query.device)
        return ExtendBlocks.on_device(lens, int(self.query_lens.sum()), rows)

    def pages_read(self, rows: int) -> list[list[int]]:
        """Number of pages that each block of `rows` rows and each kv head reads."""
        blocks, found = self.blocks(rows), []
        for seq, begin in zip(blocks.seq.tolist(), blocks.begin.tolist(), strict=True):
            first = int(self.cu_query[seq]) + begin
            last = first if begin < 0 else min(int(self.cu_query[seq + 1]), first + rows)
            heads = self.selected[first:last].transpose(0, 1)
            found.append([len(set(own.flatten().tolist()) - {-1}) for own in heads])
        return found

    def by_cuda(self, kernel: UnionAttention, out: torch.Tensor) -> torch.Tensor:
        """Into `out`, which holds the window's output; returns counts."""
        return kernel(
            self.selected,
            self.query,
            self.scoring,
            self.pool,
            self.vectors,
            self.bias,
            self.page_table,
            self.cu_query,
            self.blocks(kernel.rows),
            out,
            self.window_lse,
            self.normalizer,
            out,
        )

    def by_triton(self) -> torch.Tensor:
        out = torch.empty_like(self.window_out)
        attend_selected(
            self.shape,
            self.selected,
            self.query,
            self.scoring,
            self.pool,
            self.vectors,
            self.bias,
            self.page_table,
            self.cu_query,
            self.blocks(union_rows(self.shape)),
            self.window_out,
            self.window_lse,
            out,
            Workspace(out.device),
            normalizer=self.normalizer,
        )
        return out


def union_case(
    shape: SparseShape,
    new: list[int],
    pages: int,  # candidates of a sequence
    dtype: torch.dtype,
    device: torch.device,
    *,
    seed: int = 0,
) -> UnionCase:
    """Rows keep most pages of the row before them. Some select fewer, and the third row none."""
    draw = np.random.default_rng(seed)
    torch.manual_seed(seed)
    rows, topk = sum(new), shape.topk
    selected = np.full((rows, shape.kv_heads, topk), -1, dtype=np.int32)
    for head in range(shape.kv_heads):
        held = draw.permutation(pages)[:topk]
        for row in range(rows):
            free = np.setdiff1d(np.arange(pages), held)
            if len(free):
                held[draw.integers(topk)] = draw.choice(free)
            count = 0 if row == 2 else draw.integers(1, topk + 1) if row % 5 == 4 else topk
            selected[row, head, :count] = draw.permutation(held)[:count]
    total = len(new) * pages
    table = (1 + draw.permutation(total)).reshape(len(new), pages).astype(np.int32)
    wide = torch.nn.functional.pad(torch.from_numpy(table), (0, 3))  # strided as the engine's
    sizes = (rows, shape.heads)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size).to(dtype).to(device)

    pool = random(total + 2, 2 * shape.kv_heads, shape.page_size, shape.head_dim)
    vectors = random(total + 2, shape.landmark_heads, shape.landmark_width)
    for tensor in (pool, vectors):
        tensor[0] = tensor[-1] = float("nan")
    bias = torch.randn(total + 2, shape.landmark_heads).to(device) if shape.hide_last else None
    lse = torch.randn(sizes).to(device)
    case = UnionCase(
        shape,
        torch.from_numpy(selected).to(device),
        random(*sizes, 3, shape.head_dim)[:, :, 0].contiguous(),
        random(*sizes, shape.landmark_width),
        pool,
        vectors,
        bias,
        wide.to(device)[:, :pages],
        torch.tensor([0, *np.cumsum(new)], dtype=torch.int32, device=device),
        np.array(new),
        random(*sizes, shape.head_dim),
        lse,
        None,
    )
    if shape.normalized and not shape.by_lse:
        mass = _masses(case).amax(-1)
        case = replace(case, normalizer=torch.maximum(mass, lse) + 0.5)
    return case


def _page_ids(case: UnionCase) -> torch.Tensor:
    """[rows, heads, topk], 1 where there is none."""
    group = case.shape.heads // case.shape.kv_heads
    seq = torch.from_numpy(np.repeat(np.arange(len(case.query_lens)), case.query_lens))
    found = case.page_table.cpu()[seq[:, None, None], case.selected.cpu().clamp(min=0).long()]
    return found.repeat_interleave(group, 1).long().to(case.query.device)


def _masses(case: UnionCase) -> torch.Tensor:
    """[rows, heads, topk] landmark scores, -inf where there is no page"""
    shape, ids = case.shape, _page_ids(case)
    shared = shape.heads // shape.landmark_heads
    own = (torch.arange(shape.heads, device=ids.device) // shared)[None, :, None]
    landmarks = case.vectors[ids, own].float()
    scores = torch.einsum("rhw,rhkw->rhk", case.scoring.float(), landmarks) * shape.scale
    if case.bias is not None:
        scores = scores + case.bias[ids, own]
    none = case.selected.repeat_interleave(shape.heads // shape.kv_heads, 1) < 0
    return scores.masked_fill(none, float("-inf"))


def expected_output(case: UnionCase) -> torch.Tensor:
    """[rows, heads, dim] in float32"""
    shape, ids = case.shape, _page_ids(case)
    group = shape.heads // shape.kv_heads
    kv_head = (torch.arange(shape.heads, device=ids.device) // group)[None, :, None]
    real = shape.page_size - shape.hide_last
    keys = case.pool[ids, kv_head][..., :real, :].float()
    values = case.pool[ids, kv_head + shape.kv_heads][..., :real, :].float()
    logits = torch.einsum("rhd,rhknd->rhkn", case.query.float(), keys) * shape.scale
    inside = torch.einsum("rhkn,rhknd->rhkd", logits.softmax(-1), values)
    mass = _masses(case)
    if shape.by_lse:
        mass = logits.logsumexp(-1).masked_fill(mass == float("-inf"), float("-inf"))
    splits = [mass, case.window_lse[..., None]]
    if shape.null_split:
        splits.append(torch.zeros_like(case.window_lse)[..., None])
    weights = torch.cat(splits, -1).softmax(-1)
    out = torch.einsum("rhk,rhkd->rhd", weights[..., : shape.topk], inside)
    return out + weights[..., shape.topk, None] * case.window_out.float()
