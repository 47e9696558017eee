"""HiLS as its definition reads: whole sequences, every pair of rows, no pages, one layer at a time.

Written from the mathematics and not from the engine, so that the two can disagree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

Config = Mapping[str, Any]
Weights = Mapping[str, torch.Tensor]


def load_weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t.double() for name, t in load_file(folder / "model.safetensors").items()}


def logprobs(config: Config, weights: Weights, ids: Sequence[int]) -> torch.Tensor:
    """float64 [tokens, vocab_size]; landmark rows are inserted, and left out of the result."""
    size, vocab = config.get("chunk_size", 64), config["vocab_size"]
    rows: list[int] = []
    for count, token in enumerate(ids, start=1):
        rows.append(token)
        if count % (size - 1) == 0:
            rows.append(vocab)
    g = torch.arange(len(rows))
    position = (g - g // size).double()
    table = weights["model.embed_tokens.weight"]
    landmark = weights["model.lmk_embed"] if "model.lmk_embed" in weights else table[vocab]
    x = torch.stack([landmark if row == vocab else table[row] for row in rows])
    olmo = config["model_type"] == "olmo_hils"
    eps = config.get("rms_norm_eps", 1e-6)
    for i in range(config["num_hidden_layers"]):
        w = {
            name.removeprefix(f"model.layers.{i}."): t
            for name, t in weights.items()
            if name.startswith(f"model.layers.{i}.")
        }

        def norm(name: str, y: torch.Tensor, w: Weights = w) -> torch.Tensor:
            return rms(y, w[f"{name}.weight"], eps)

        attend = hils_layer if is_hils(config, i) else window_layer
        if olmo:
            x = x + norm("post_attention_layernorm", attend(config, w, x, position))
            x = x + norm("post_feedforward_layernorm", mlp(w, x))
        else:
            x = x + attend(config, w, norm("input_layernorm", x), position)
            x = x + mlp(w, norm("post_attention_layernorm", x))
    x = rms(x, weights["model.norm.weight"], eps)
    head = weights.get("lm_head.weight", table)
    real = torch.tensor([row != vocab for row in rows])
    return (x @ head.T)[real][:, :vocab].log_softmax(-1)


def is_hils(config: Config, layer: int) -> bool:
    every, first = config.get("full_attn_interleave", 4), config.get("num_swa_layers", 0)
    return bool(layer >= first and (layer - first) % every == every - 1)


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def mlp(w: Weights, x: torch.Tensor) -> torch.Tensor:
    gate, up = x @ w["mlp.gate_proj.weight"].T, x @ w["mlp.up_proj.weight"].T
    return (gate * gate.sigmoid() * up) @ w["mlp.down_proj.weight"].T


def heads_of(x: torch.Tensor, weight: torch.Tensor, eps: float, dim: int) -> torch.Tensor:
    """Norm over each head or over all of them, as the weight's length says; [rows, heads, dim]."""
    if len(weight) == dim:
        return rms(x.view(len(x), -1, dim), weight, eps)
    return rms(x, weight, eps).view(len(x), -1, dim)


def turn(x: torch.Tensor, position: torch.Tensor, frequency: torch.Tensor) -> torch.Tensor:
    angle = position[:, None, None] * frequency
    first, second = x.chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def frequencies(config: Config, dim: int, *, hils: bool) -> torch.Tensor:
    theta, positions = config.get("rope_theta", 1e4), config["max_position_embeddings"]
    plain = torch.tensor([theta ** (-2 * j / dim) for j in range(dim // 2)], dtype=torch.float64)
    hope = bool(config.get("use_hope"))
    if config["model_type"] == "olmo_hils" and not (hils and hope):
        return plain
    if config.get("enable_inrange_rope"):
        length = config.get("rope_context_length", positions)
        least = 2 * math.pi * config.get("rope_period_multiplier", 1.0) / length
        return torch.tensor([f if j == 0 or f >= least else 0.0 for j, f in enumerate(plain)])
    if hope:
        n = min(max(round(config.get("hope_partial_ratio", 0.5) * dim / 2), 1), dim // 2)
        length = config.get("hope_context_length", positions)
        base = config.get("hope_theta") or (length / (2 * math.pi)) ** (n / max(n - 1, 1))
        turning = [base ** (-j / n) if j < n else 0.0 for j in range(dim // 2)]
        return torch.tensor(turning, dtype=torch.float64)
    return plain


def window_layer(config: Config, w: Weights, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config["hidden_size"] // heads
    eps = config.get("rms_norm_eps", 1e-6)

    def project(name: str) -> torch.Tensor:
        y = x @ w[f"self_attn.{name}_proj.weight"].T
        bias = w.get(f"self_attn.{name}_proj.bias")
        return y if bias is None else y + bias

    q = heads_of(project("q"), w["self_attn.q_norm.weight"], eps, dim)
    k = heads_of(project("k"), w["self_attn.k_norm.weight"], eps, dim)
    v = project("v").view(len(x), -1, dim)
    turns = frequencies(config, dim, hils=False)
    q, k = turn(q, pos, turns), turn(k, pos, turns)
    k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
    i, j = torch.arange(len(x))[:, None], torch.arange(len(x))[None]
    seen = j <= i
    if config.get("use_sliding_window"):
        seen = seen & (j > i - config.get("sliding_window", 4096))
    if config.get("mask_lmk_token"):
        size = config.get("chunk_size", 64)
        seen = seen & (j % size != size - 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) / dim**0.5
    p = scores.masked_fill(~seen, -math.inf).softmax(-1)
    out = torch.einsum("hij,jhd->ihd", p, v).reshape(len(x), -1)
    out = out @ w["self_attn.o_proj.weight"].T
    bias = w.get("self_attn.o_proj.bias")
    return out if bias is None else out + bias


def hils_layer(config: Config, w: Weights, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    n, heads, kv_heads = len(x), config["num_attention_heads"], config["num_key_value_heads"]
    dim, size = config["hidden_size"] // heads, config.get("chunk_size", 64)
    group, scale = heads // kv_heads, dim**-0.5
    window = config.get("hils_sliding_window", config.get("sliding_window", 4096))
    q0 = x @ w["self_attn.q_proj.weight"].T
    q = heads_of(q0, w["self_attn.q_norm.weight"], 1e-6, dim)
    k = heads_of(x @ w["self_attn.k_proj.weight"].T, w["self_attn.k_norm.weight"], 1e-6, dim)
    v = (x @ w["self_attn.v_proj.weight"].T).view(n, -1, dim)
    lq = q
    if config.get("enable_lmk_q_proj"):
        if config.get("lmk_q_lora_dim", -1) > 0:
            down, up = w["self_attn.lmk_q_proj.0.weight"], w["self_attn.lmk_q_proj.1.weight"]
            lq0 = x @ down.T @ up.T + q0
        else:
            lq0 = x @ w["self_attn.lmk_q_proj.weight"].T
        lq = heads_of(lq0, w["self_attn.lmk_q_norm.weight"], 1e-6, dim)
    prior = w["self_attn.q_c"].expand(n, -1, -1) if config.get("shared_q_c") else None
    if config.get("apply_hils_rope"):
        turns = frequencies(config, dim, hils=True)
        q, k = turn(q, pos, turns), turn(k, pos, turns)
        lq = turn(lq, pos, turns) if config.get("enable_lmk_q_proj") else q
        prior = None if prior is None else turn(prior, pos, turns)
    prior = lq if prior is None else prior
    keys, values = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    i, j = torch.arange(n)[:, None], torch.arange(n)[None]
    limit = torch.div(i - window + 1, size, rounding_mode="floor")
    seen = (j >= limit * size) & (j <= i) & (j % size != size - 1)
    scores = torch.einsum("ihd,jhd->hij", q, keys) * scale
    scores = scores.masked_fill(~seen, -math.inf)
    lse = scores.logsumexp(-1).T  # [n, heads]
    window_out = torch.einsum("hij,jhd->ihd", scores.softmax(-1), values)
    count = n // size
    null = [torch.zeros(n, heads, 1, dtype=x.dtype)] if config.get("enable_softmax1", True) else []
    if count == 0:
        mix = torch.cat([lse[..., None], *null], -1).softmax(-1)
        out = mix[..., :1] * window_out
        return out.reshape(n, -1) @ w["self_attn.o_proj.weight"].T
    pages = keys[: count * size].view(count, size, heads, dim)
    page_values = values[: count * size].view(count, size, heads, dim)[:, :-1]
    if config.get("enable_prior_query", True):
        mu = prior[size - 1 :: size][:count]
        p = (torch.einsum("chd,cshd->chs", mu, pages[:, :-1]) * scale).softmax(-1)
        landmark = torch.einsum("chs,cshd->chd", p, pages[:, :-1])
        bias = -(p * p.log()).sum(-1)
    else:
        landmark, bias = pages[:, -1], torch.zeros(count, heads, dtype=x.dtype)
    a = torch.einsum("ihd,chd->ihc", lq, landmark) * scale + bias.T
    a = a.masked_fill((torch.arange(count) >= limit)[:, None], -math.inf)
    total = torch.logaddexp(lse, a.logsumexp(-1))
    best = (a - total[..., None]).view(n, kv_heads, group, count).amax(2)
    order = best.sort(dim=-1, descending=True, stable=True).indices
    order = order[..., : config.get("hils_topk", 16)]
    kept = torch.zeros_like(best, dtype=torch.bool).scatter(-1, order, True) & best.isfinite()
    kept = kept.repeat_interleave(group, 1)  # [n, heads, chunks]
    mix = torch.cat([a.masked_fill(~kept, -math.inf), lse[..., None], *null], -1).softmax(-1)
    out = mix[..., count, None] * window_out
    for c in range(count):  # each page by itself, with a softmax of its own
        inside = torch.einsum("ihd,shd->ihs", q, pages[c, :-1]) * scale
        own = torch.einsum("ihs,shd->ihd", inside.softmax(-1), page_values[c])
        out = out + mix[..., c, None] * own
    return out.reshape(n, -1) @ w["self_attn.o_proj.weight"].T
