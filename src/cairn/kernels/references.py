"""Torch references of the kernels, for tests. Each takes the arguments of its kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from cairn.kernels.fp8_rows import FP8, MOST, store_rows
from cairn.kernels.fp8_rows import hadamard as multiply
from cairn.kernels.interface import RowInputs, ScoringHeads
from cairn.kernels.sizes import blocks_of

if TYPE_CHECKING:
    from cairn.kernels.list_rows import ListedRows


def paged_attention(
    query: torch.Tensor,  # [rows, heads, dim]
    pool: torch.Tensor,  # [pages, 2 * kv_heads, page_size, dim]
    page_table: torch.Tensor,  # [seqs, pages]
    kv_lens: list[int],
    query_lens: list[int],
    *,
    scale: float,
    window: int | None = None,
    hide_last: bool = False,
    fp8: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> output [rows, heads, dim] and log-sum-exp [rows, heads], both float32 or wider

    With `fp8`, queries and softmax weights are rounded as FlashAttention-3 does for products of
    e4m3. It scales weights to at most 256.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    kv_heads, page_size = pool.shape[1] // 2, pool.shape[2]
    outs, lses, row = [], [], 0
    for s, (length, count) in enumerate(zip(kv_lens, query_lens, strict=True)):
        pages = pool[page_table[s, : -(-length // page_size)].long()].to(wide)
        both = pages.transpose(1, 2).flatten(0, 1)[:length]  # [length, 2 * kv_heads, dim]
        key, value = both[:, :kv_heads], both[:, kv_heads:]
        own = query[row : row + count].to(wide)
        own = _e4m3(own) if fp8 else own
        group = own.shape[1] // kv_heads
        key, value = (t.repeat_interleave(group, 1) for t in (key, value))
        scores = torch.einsum("qhd,khd->qhk", own, key) * scale
        position = torch.arange(length - count, length, device=query.device)[:, None]
        n = torch.arange(length, device=query.device)[None]
        seen = n <= position
        if window is not None:
            seen = seen & (n > position - window)
        if hide_last:
            seen = seen & (n % page_size != page_size - 1)
        scores = scores.masked_fill(~seen[:, None], float("-inf"))
        lse = scores.logsumexp(-1)
        weights = (scores - lse[..., None]).exp()
        if fp8:
            unit = weights.amax(-1, keepdim=True) / 256
            weights = _e4m3(weights / unit) * unit
        outs.append(torch.einsum("qhk,khd->qhd", weights, value))
        lses.append(lse)
        row += count
    return torch.cat(outs), torch.cat(lses)


def _e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-MOST[FP8], MOST[FP8]).to(FP8).to(x.dtype)


def latent_attention(
    query: torch.Tensor,  # [rows, heads, latent + rope]
    pool: torch.Tensor,  # [pages, page_size, latent + rope]
    page_table: torch.Tensor,  # [seqs, pages]
    kv_lens: list[int],
    query_lens: list[int],
    *,
    latent: int,
    scale: float,
) -> torch.Tensor:
    """-> [rows, heads, latent], float32 or wider"""
    as_values = torch.stack((pool, pool), 1)
    attended, _ = paged_attention(query, as_values, page_table, kv_lens, query_lens, scale=scale)
    return attended[..., :latent]


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (scaled * weight.to(scaled.dtype)).to(x.dtype)


def silu_and_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def gemv_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    silu: bool = False,
    norm: tuple[torch.Tensor, float] | None = None,
    add_to: torch.Tensor | None = None,
) -> torch.Tensor:
    if silu:
        gate, up = x.chunk(2, dim=-1)
        x = torch.nn.functional.silu(gate) * up
    if norm is not None:
        x = rms_norm_reference(x, *norm)
    out = x @ weight.t()
    return out if add_to is None else add_to.add_(out)


def gather_pages_reference(pool: torch.Tensor, pages: torch.Tensor, ratio: int) -> torch.Tensor:
    """Without `out`, which it returns."""
    taken = pool[pages.long()].unflatten(0, (-1, ratio))  # [n, ratio, 2 * kv_heads, size, dim]
    gathered: torch.Tensor = taken.transpose(1, 2).flatten(2, 3)
    return gathered


def rope_angles_reference(
    positions: torch.Tensor, frequencies: torch.Tensor, scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    angles = positions.to(torch.float32)[:, None] * frequencies
    cos, sin = (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)
    return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]


def rope_kv_reference(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    pool: torch.Tensor,
    pages: torch.Tensor,
    offsets: torch.Tensor,
    heads: int,
    scoring: ScoringHeads | None = None,
    scales: tuple[float, float] = (0.0, 0.0),
    *,
    hadamard: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    kv_heads, dim = pool.shape[1] // 2, pool.shape[3]
    x = qkv[:, : (heads + 2 * kv_heads) * dim].reshape(len(qkv), -1, dim)
    scored = x[:, :heads]
    if scoring is not None:
        projected = scoring.projected.reshape(len(qkv), heads, dim)
        scored = projected + scored if scoring.add_query else projected
        scored = rms_norm_reference(scored, scoring.norm_weight, eps)
        scored = scored * cos[:, None] + scored.roll(dim // 2, -1) * sin[:, None]
    query, key, value = x[:, :heads], x[:, heads : heads + kv_heads], x[:, heads + kv_heads :]
    if q_weight is not None and k_weight is not None:
        query = rms_norm_reference(query, q_weight, eps)
        key = rms_norm_reference(key, k_weight, eps)
    query, key = (t * cos[:, None] + t.roll(dim // 2, -1) * sin[:, None] for t in (query, key))
    query, key = query.to(qkv.dtype), key.to(qkv.dtype)
    if hadamard:
        query, key = multiply(query), multiply(key)
    rows = torch.cat((key, value), 1)
    given = torch.tensor(scales, device=pool.device).repeat_interleave(kv_heads)
    store_rows(pool, pages.long(), offsets.long(), rows, given, query)
    return query, query if scoring is None else scored.to(qkv.dtype)


def sample_reference(
    logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor
) -> torch.Tensor:
    from cairn.kernels import sampling

    size = sampling._BLOCK
    padding = blocks_of(logits.shape[1], size) * size - logits.shape[1]
    wide = torch.nn.functional.pad(logits.float(), (0, padding), value=float("-inf"))
    shifted = wide - wide.amax(-1, keepdim=True)
    weights = (shifted / temperatures.clamp(min=1e-30)[:, None]).exp()
    by_block = weights.view(len(logits), -1, size)
    low, high = (seeds & 0xFFFFFFFF, (seeds >> 32) & 0xFFFFFFFF)
    block = _draw(by_block.sum(-1), _uniform(low, high))
    within = by_block[torch.arange(len(logits), device=logits.device), block]
    drawn = block * size + _draw(within, _uniform(high, low))
    return torch.where(temperatures > 0, drawn, wide.argmax(-1))


def _draw(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """weights [rows, n] -> [rows] first index where the running sum exceeds uniform * total"""
    running = weights.cumsum(-1)
    index = torch.arange(weights.shape[1], device=weights.device)
    passed = (running > (uniform * weights.sum(-1))[:, None]) & (weights > 0)
    last = torch.where(weights > 0, index, -1).amax(-1)  # used if rounding lets none pass
    return torch.where(passed.any(-1), passed.int().argmax(-1), last)


def _uniform(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Hash two 32-bit numbers to a float in [0, 1)."""
    mixed = _mix((_mix(first) + second) & 0xFFFFFFFF)
    return (mixed >> 8).to(torch.float32) / 2**24


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & 0xFFFFFFFF
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def stage_reference(
    pages: torch.Tensor,  # [blocks, kv_heads, n] page ids
    counts: torch.Tensor,  # [blocks, kv_heads]
    frame_of: torch.Tensor,  # [num_pages]
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Places in the stage are in the order of page ids.

    Returns the pages that each kv head stages, and the location of every entry's page, which is the
    null page for unused entries.
    """
    there = torch.arange(pages.shape[2], device=pages.device) < counts[..., None]
    ids = torch.where(there, pages, 0).long().transpose(0, 1).flatten(1)  # [kv_heads, entries]
    frames = frame_of[ids]
    marked = torch.zeros(len(ids), len(frame_of), dtype=torch.int32, device=ids.device)
    marked.scatter_(1, torch.where(frames == 0, ids, 0), 1)
    marked[:, 0] = 0
    slots = marked.cumsum(1, dtype=torch.int32) - 1
    found = torch.where(frames > 0, frames, -1 - slots.gather(1, ids)).masked_fill(ids == 0, 0)
    staged = [own.nonzero().squeeze(1) for own in marked]
    return staged, found.view(len(ids), len(pages), -1).transpose(0, 1).contiguous()


def list_rows_reference(
    cu_query: torch.Tensor,  # [seqs + 1]
    kv_lens: torch.Tensor,  # [seqs]
    listed: ListedRows,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> seqs [rows], limits [rows] and items [tiles, most_items + 1]"""
    rows, at_once = len(listed.limits), listed.at_once
    row = torch.arange(rows)
    seqs = torch.searchsorted(cu_query[1:].contiguous(), row, right=True)
    limits = kv_lens[seqs] - cu_query[seqs + 1] + row + 1
    tile = row // at_once * at_once
    begins = (row - torch.maximum(cu_query[seqs], tile)) % listed.per_item == 0
    items = torch.empty(len(listed.items), listed.most_items + 1, dtype=torch.int64)
    for own, begin in zip(items, range(0, rows, at_once), strict=True):
        first = begins[begin : begin + at_once].nonzero()[:, 0]
        own[:] = min(at_once, rows - begin)
        own[: len(first)] = first
    return seqs, limits, items


def index_scan_reference(
    query: torch.Tensor,  # [heads, width] of one row
    weights: torch.Tensor,  # [heads]
    keys: torch.Tensor,  # [rows that it sees, width]
) -> torch.Tensor:
    """-> [rows that it sees]"""
    return weights @ (query @ keys.t()).relu()


def row_attention_reference(
    query: torch.Tensor,  # [heads, latent + rope] of one row
    kept: torch.Tensor,  # [chosen rows, latent + rope]
    *,
    latent: int,
    scale: float,
) -> torch.Tensor:
    """-> [heads, latent]"""
    return (query @ kept.t() * scale).softmax(-1) @ kept[:, :latent]


def keep_newest_reference(
    tokens: torch.Tensor,
    newest: torch.Tensor,
    first: torch.Tensor,
    checked: torch.Tensor,
    places: torch.Tensor,
    right: torch.Tensor,
    most: int,
) -> None:
    for r, (begin, count, place) in enumerate(zip(first, checked, places, strict=True)):
        same = tokens[begin : begin + count] == newest[place + 1 : place + 1 + count]
        right[r] = same.int().cumprod(0).sum()
        newest[place] = tokens[begin + right[r]]


def move_rows_reference(
    rows: RowInputs,
    request_seeds: torch.Tensor,
    room: torch.Tensor,
    right: torch.Tensor | None,
    further: int,
    page_size: int,
) -> None:
    for r in range(len(room)):
        position = int(rows.positions[r]) + further + (0 if right is None else int(right[r]))
        rows.positions[r] = position
        rows.lengths[r] = max(int(rows.lengths[r]), position + 1)
        rows.kv_lens[r] = min(position + 1, int(room[r]))
        rows.offsets[r] = position % page_size
        for pages, table in zip(rows.pages, rows.tables, strict=False):
            pages[r] = table[r, position // page_size] if position < room[r] else 0
        rows.sources[r] += further
        rows.places[r] += further
        mixed = (int(request_seeds[r]) + (position + 1) * 0x9E3779B97F4A7C15) % 2**64
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            mixed = (mixed ^ (mixed >> shift)) * factor % 2**64
        rows.seeds[r] = mixed - 2**64 if mixed >= 2**63 else mixed


def kept_tables_reference(
    kept: torch.Tensor,
    kept_from: torch.Tensor,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    *,
    pages: int,
    page_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    layers, _, kv_heads, count = kept.shape
    seqs, width = page_table.shape
    first = kept_from[:seqs]
    window = first[:, None] + torch.arange(pages - count, device=kept.device)
    window = window[None, :, None].expand(layers, -1, kv_heads, -1)
    places = torch.cat((kept[:, :seqs].clamp(min=0), window), 3).clamp(max=width - 1).long()
    tables = page_table[None, :, None].expand(layers, -1, kv_heads, -1).gather(3, places)
    return tables, kv_lens + (count - first) * page_size
