"""DeepSeek sparse attention from its definition, in float64, one query at a time and without a
cache. It shares no code with the engine."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


class Reference:
    def __init__(self, folder: Path, config: dict[str, Any], full: list[bool]) -> None:
        tensors = load_file(folder / "model.safetensors")
        self.weights = {name: tensor.double() for name, tensor in tensors.items()}
        self.config, self.full = config, full
        self.selected: dict[int, list[list[int]]] = {}
        """By layer: the positions that each query read, ascending."""

    def logprobs(self, ids: list[int]) -> torch.Tensor:
        x = self.weights["model.embed_tokens.weight"][ids]
        selection: list[list[int]] = []
        for layer, has_index in enumerate(self.full):
            name = f"model.layers.{layer}"
            normed = self.rms(f"{name}.input_layernorm", x)
            latent = self.product(f"{name}.self_attn.q_a_proj", normed)
            latent = self.rms(f"{name}.self_attn.q_a_layernorm", latent)
            if has_index:
                selection = self.select(f"{name}.self_attn.indexer", normed, latent)
            self.selected[layer] = selection
            x = x + self.attention(f"{name}.self_attn", normed, latent, selection)
            x = x + self.mlp(f"{name}.mlp", self.rms(f"{name}.post_attention_layernorm", x))
        return self.product("lm_head", self.rms("model.norm", x)).log_softmax(-1)

    def select(self, name: str, x: torch.Tensor, latent: torch.Tensor) -> list[list[int]]:
        heads, width = self.config["index_n_heads"], self.config["index_head_dim"]
        rope, k = self.config["qk_rope_head_dim"], self.config["index_topk"]
        query = self.product(f"{name}.wq_b", latent).view(len(x), heads, width)
        key = self.product(f"{name}.wk", x)
        mean = key.mean(-1, keepdim=True)
        key = (key - mean) / (key.var(-1, keepdim=True, unbiased=False) + 1e-6).sqrt()
        key = key * self.weights[f"{name}.k_norm.weight"] + self.weights[f"{name}.k_norm.bias"]
        weights = self.product(f"{name}.weights_proj", x) * heads**-0.5
        interleaved = self.config["indexer_rope_interleave"]
        selection = []
        turned = [self.turn(key[s, :rope], s, interleaved) for s in range(len(x))]
        keys = [torch.cat((turned[s], key[s, rope:])) for s in range(len(x))]
        for t in range(len(x)):
            own = [
                torch.cat((self.turn(query[t, h, :rope], t, interleaved), query[t, h, rope:]))
                for h in range(heads)
            ]
            products = torch.stack(own) @ torch.stack(keys[: t + 1]).T  # [heads, t + 1]
            scores = (width**-0.5 * (weights[t] @ products.clamp(min=0))).tolist()
            best = sorted(range(t + 1), key=lambda s: (-scores[s], s))[:k]
            selection.append(sorted(best))
        return selection

    def attention(
        self, name: str, x: torch.Tensor, latent: torch.Tensor, selection: list[list[int]]
    ) -> torch.Tensor:
        config = self.config
        heads, nope, rope = (
            config[field]
            for field in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim")
        )
        query = self.product(f"{name}.q_b_proj", latent).view(len(x), heads, nope + rope)
        both = self.product(f"{name}.kv_a_proj_with_mqa", x)
        kept = self.rms(f"{name}.kv_a_layernorm", both[:, : config["kv_lora_rank"]])
        expanded = self.product(f"{name}.kv_b_proj", kept).view(len(x), heads, -1)
        shared = [self.turn(both[s, config["kv_lora_rank"] :], s, True) for s in range(len(x))]
        outs = []
        for t, rows in enumerate(selection):
            read = []
            for h in range(heads):
                own = torch.cat((query[t, h, :nope], self.turn(query[t, h, nope:], t, True)))
                keys = torch.stack([torch.cat((expanded[s, h, :nope], shared[s])) for s in rows])
                shares = (keys @ own * (nope + rope) ** -0.5).softmax(0)
                read.append(shares @ expanded[rows, h, nope:])
            outs.append(torch.cat(read))
        return self.product(f"{name}.o_proj", torch.stack(outs))

    def turn(self, x: torch.Tensor, position: int, interleaved: bool) -> torch.Tensor:
        theta, half = self.config["rope_theta"], len(x) // 2
        out = x.clone()
        for j in range(half):
            angle = position * theta ** (-2 * j / len(x))
            a, b = (2 * j, 2 * j + 1) if interleaved else (j, j + half)
            out[a] = x[a] * math.cos(angle) - x[b] * math.sin(angle)
            out[b] = x[b] * math.cos(angle) + x[a] * math.sin(angle)
        return out

    def mlp(self, name: str, x: torch.Tensor) -> torch.Tensor:
        gate, up = (self.product(f"{name}.{part}_proj", x) for part in ("gate", "up"))
        return self.product(f"{name}.down_proj", gate * gate.sigmoid() * up)

    def rms(self, name: str, x: torch.Tensor) -> torch.Tensor:
        squares: torch.Tensor = x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]
        return x / squares.sqrt() * self.weights[f"{name}.weight"]

    def product(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weights[f"{name}.weight"].T
