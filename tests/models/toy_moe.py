"""A toy mixture-of-experts model, as one file outside of the package.

LLM(folder, model_impl="tests.models.toy_moe:build")
"""

from __future__ import annotations

import torch

from cairn.models.config_reader import ConfigReader
from cairn.models.decoder import MLP, CausalLM, FeedForward
from cairn.models.fields import FULL, read_decoder, read_dimensions
from cairn.models.layers import Linear
from cairn.models.module import Factory
from cairn.models.spec import DecoderSpec


class Experts(FeedForward):
    """A router picks `per_token` of the experts for every row and weighs their outputs."""

    def __init__(
        self, spec: DecoderSpec, layer: int, factory: Factory, experts: int, per_token: int
    ) -> None:
        self._per_token = per_token
        self.router = Linear(spec.dims.hidden_size, {"router": experts}, factory)
        self.experts = [MLP(spec, layer, factory) for _ in range(experts)]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.router(x).softmax(-1)
        best = scores.topk(self._per_token, -1)
        weights = torch.zeros_like(scores).scatter(-1, best.indices, best.values)
        weights = weights / weights.sum(-1, keepdim=True)
        # Every expert computes every row: slow, and the shapes do not depend on what is chosen.
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            out += weights[:, i : i + 1] * expert(x)
        return out


def build(config: ConfigReader, factory: Factory) -> CausalLM:
    dims = read_dimensions(config)
    dense = config.take("num_dense_layers", int, 0)
    experts = config.take_positive("num_experts")
    per_token = config.take_positive("num_experts_per_tok")
    spec = read_decoder(config, dims, [FULL] * dims.num_layers)

    def feed_forward(spec: DecoderSpec, layer: int, factory: Factory) -> FeedForward:
        if layer < dense:
            return MLP(spec, layer, factory)
        return Experts(spec, layer, factory, experts, per_token)

    return CausalLM(spec, factory, feed_forward=feed_forward)
