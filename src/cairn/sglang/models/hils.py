"""HiLS models in SGLang: Cairn's decoder, with SGLang's logits, over SGLang's pages.

SGLang feeds tokens. The landmark rows that these models need at the end of each page are put in
between here and left out again before logits are computed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.runtime_context import get_server_args
from torch import nn

from cairn.errors import ConfigError
from cairn.models.decoder import CausalLM
from cairn.models.loader import build_model, write_tensors
from cairn.sglang.backend import CairnAttnBackend
from cairn.sglang.hf_config import HiLSConfig
from cairn.sglang.options import refuse_features, refuse_overrides


class HiLSForCausalLM(nn.Module):
    def __init__(self, config: HiLSConfig, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        args = get_server_args()
        refuse_features(args)
        refuse_overrides(args.json_model_override_args)
        if quant_config is not None:
            raise ConfigError("quantization is set; HiLS models have their weights as they are")
        device = torch.empty(0).device
        model = build_model(config.reader(), torch.get_default_dtype(), device)
        assert isinstance(model, CausalLM)
        if model.spec.dynamic_rope_context is not None:
            raise ConfigError("rope_scaling is dynamic, which hsa does not support in SGLang")
        self.cairn = model
        self.cairn_spec = model.spec
        # SGLang finds weights as parameters; these are Cairn's own tensors.
        self.weights = nn.ParameterList(
            nn.Parameter(tensor, requires_grad=False) for _, tensor in self.cairn.named_tensors()
        )
        self.lm_head = nn.Module()
        self.logits_processor = LogitsProcessor(config)

    @torch.no_grad()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: Any,
        input_embeds: torch.Tensor | None = None,
    ) -> Any:
        if input_embeds is not None:
            raise ConfigError("input_embeds are given; HiLS models take token ids")
        backend = get_attn_backend()
        assert isinstance(backend, CairnAttnBackend)
        step = backend.sparse.step
        assert step is not None and self.cairn_spec.sparsity is not None
        ids = step.token_ids(input_ids, self.cairn_spec.sparsity.landmark_id)
        # Not SGLang's attention layers, which cut off rows that are no tokens.
        attend = backend.sparse.attend
        hidden = self.cairn.model(ids, step.positions, step.positions, attend)
        return self.logits_processor(input_ids, step.of_tokens(hidden), self.lm_head, forward_batch)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        source = self.cairn_spec.architecture
        write_tensors(self.cairn, ((source, *named) for named in weights), source)
        self.post_load_weights()

    def post_load_weights(self) -> None:
        """Rows beyond the vocabulary, such as the landmark's, are no tokens."""
        head, embedding = self.cairn.lm_head, self.cairn.model.embed_tokens
        rows = (embedding.weight if head is None else head.dense())[: self.cairn_spec.vocab_size]
        self.lm_head.weight = nn.Parameter(rows, requires_grad=False)


EntryClass = HiLSForCausalLM
