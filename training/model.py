"""The decoder, with HiLS or plain causal layers. Parameters have the checkpoint's names."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from training.attention import attend, first_window_chunk, landmarks
from training.model_config import ModelConfig


class Layout(NamedTuple):
    """What all layers share in one forward pass."""

    cos: torch.Tensor  # [rows, head_dim]
    sin: torch.Tensor
    rows: torch.Tensor  # [rows]
    window_chunk: torch.Tensor  # [rows]
    top_k: int
    read_all: torch.Tensor  # a flag; a number would be compiled in as a constant
    rivals_ahead: torch.Tensor | None
    block: int
    """Queries at a time; 0 for all at once."""


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)
        return wide * self.weight


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.ffn, bias=False)
        self.up_proj = nn.Linear(config.width, config.ffn, bias=False)
        self.down_proj = nn.Linear(config.ffn, config.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self._config = config
        width, dim = config.width, config.head_dim
        self.q_proj = nn.Linear(width, config.heads * dim, bias=False)
        self.k_proj = nn.Linear(width, config.kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(width, config.kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.heads * dim, width, bias=False)
        eps = 1e-6 if config.architecture == "hils" else config.norm_eps
        self.q_norm, self.k_norm = RMSNorm(dim, eps), RMSNorm(dim, eps)
        if config.architecture == "hils":
            self.lmk_q_proj = nn.Sequential(
                nn.Linear(width, config.calibration, bias=False),
                nn.Linear(config.calibration, config.heads * dim, bias=False),
            )
            self.lmk_q_norm = RMSNorm(dim, eps)

    def forward(self, x: torch.Tensor, layout: Layout) -> torch.Tensor:
        config = self._config
        dim, group = config.head_dim, config.heads // config.kv_heads

        def heads(y: torch.Tensor) -> torch.Tensor:
            return torch.unflatten(y, -1, (-1, dim)).transpose(1, 2)  # [batch, heads, rows, dim]

        def turn(y: torch.Tensor) -> torch.Tensor:
            first, second = y.chunk(2, -1)
            return y * layout.cos + torch.cat((-second, first), -1) * layout.sin

        raw = self.q_proj(x)
        query = turn(self.q_norm(heads(raw)))
        key = turn(self.k_norm(heads(self.k_proj(x))))
        value = heads(self.v_proj(x))
        if config.architecture == "full":
            out = F.scaled_dot_product_attention(
                query.to(value.dtype), key.to(value.dtype), value, is_causal=True, enable_gqa=True
            )
        else:
            scoring = turn(self.lmk_q_norm(heads(self.lmk_q_proj(x) + raw)))
            key, value = (t.repeat_interleave(group, 1) for t in (key, value))
            with torch.autocast(x.device.type, enabled=False):  # scores in full precision
                out = self._hils(query, scoring, key, value, layout)
        projected: torch.Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return projected

    def _hils(
        self,
        query: torch.Tensor,
        scoring: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layout: Layout,
    ) -> torch.Tensor:
        config = self._config
        chunk, group = config.chunk, config.heads // config.kv_heads
        summary = landmarks(scoring, key, chunk)
        size = layout.block or query.shape[2]
        outs = []
        for start in range(0, query.shape[2], size):
            part = slice(start, start + size)
            outs.append(
                attend(
                    query[:, :, part],
                    scoring[:, :, part],
                    key,
                    value,
                    summary,
                    layout.rows[part],
                    layout.window_chunk[part],
                    chunk,
                    group,
                    layout.top_k,
                    layout.read_all,
                    layout.rivals_ahead,
                )
            )
        return outs[0] if len(outs) == 1 else torch.cat(outs, 2)


class Layer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.width, config.norm_eps)
        self.post_attention_layernorm = RMSNorm(config.width, config.norm_eps)

    def forward(self, x: torch.Tensor, layout: Layout) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), layout)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Body(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.rows, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width, config.norm_eps)


class Decoder(nn.Module):
    """Maps tokens to their hidden states. Landmark rows are added and removed inside."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Body(config)
        self.window, self.top_k = config.window, config.top_k
        self.read_all = False
        """Read every chunk instead of the best `top_k`."""
        self.rivals_ahead: float | None = None
        """How much the scores of other texts' chunks are raised; None: these do not compete."""
        self.recompute = False
        """Keep only the layers' inputs for the backward pass."""
        self.run_layer: Callable[[Layer, torch.Tensor, Layout], torch.Tensor] = run_layer
        self._initialise()

    def forward(self, tokens: torch.Tensor, block: int = 0) -> torch.Tensor:
        """[batch, tokens] -> [batch, tokens, width]; fp32 unless under autocast."""
        config = self.config
        sparse, length = config.architecture == "hils", tokens.shape[1]
        x = self.model.embed_tokens(self._with_landmarks(tokens) if sparse else tokens)
        layout = self._layout(x.shape[1], tokens.device, block)
        for layer in self.model.layers:
            assert isinstance(layer, Layer)
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(
                    self.run_layer, layer, x, layout, use_reentrant=False, preserve_rng_state=False
                )
            else:
                x = self.run_layer(layer, x, layout)
        if sparse:
            x = torch.unflatten(x, 1, (-1, config.chunk))[:, :, :-1].flatten(1, 2)[:, :length]
        out: torch.Tensor = self.model.norm(x)
        return out

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of real tokens only: landmark and padding rows are never predicted."""
        return F.linear(hidden, self.model.embed_tokens.weight[: self.config.vocab_size])

    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def _with_landmarks(self, tokens: torch.Tensor) -> torch.Tensor:
        """Pad to whole chunks, and end each with a landmark row. No token sees the padding."""
        real = self.config.chunk - 1
        padded = torch.unflatten(F.pad(tokens, (0, -tokens.shape[1] % real)), 1, (-1, real))
        return F.pad(padded, (0, 1), value=self.config.landmark_id).flatten(1)

    def _layout(self, count: int, device: torch.device, block: int) -> Layout:
        config = self.config
        rows = torch.arange(count, device=device)
        exponents = torch.arange(0, config.head_dim, 2, device=device) / config.head_dim
        frequency = 1.0 / config.rope_theta**exponents  # bit for bit what the engine computes
        position = rows
        if config.architecture == "hils":
            position = rows - rows // config.chunk  # a landmark has the next token's position
            least = 2 * math.pi * config.rope_multiplier / config.rope_context
            still = frequency < least
            still[0] = False
            frequency = frequency.masked_fill(still, 0.0)
        angle = (position[:, None].float() * frequency).repeat(1, 2)
        first = first_window_chunk(rows, self.window, config.chunk)
        read_all = torch.tensor(self.read_all, device=device)
        ahead = None
        if self.rivals_ahead is not None:
            ahead = torch.tensor(self.rivals_ahead, device=device)
        return Layout(angle.cos(), angle.sin(), rows, first, self.top_k, read_all, ahead, block)

    def _initialise(self) -> None:
        shrink = (2 * self.config.layers) ** -0.5
        for name, parameter in self.named_parameters():
            if name.endswith("embed_tokens.weight"):
                nn.init.normal_(parameter, std=self.config.width**-0.5)
            elif name.endswith("lmk_q_proj.1.weight"):
                nn.init.zeros_(parameter)  # at first pages are scored with the ordinary query
            elif parameter.dim() == 2:
                std = 0.7 * parameter.shape[1] ** -0.5
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=std * shrink if last else std)


def run_layer(layer: Layer, x: torch.Tensor, layout: Layout) -> torch.Tensor:
    out: torch.Tensor = layer(x, layout)
    return out
