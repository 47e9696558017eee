"""`--attention-backend hsa` of SGLang."""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import RadixAttention

from cairn.errors import ConfigError
from cairn.models.spec import ModelSpec
from cairn.sglang.hooks import missing_hooks
from cairn.sglang.layers import describe
from cairn.sglang.options import FIELD, read_plan, refuse_features
from cairn.sglang.pool import adopt_pool
from cairn.sglang.sparse import SparseAttention

_log = logging.getLogger("cairn")


class CairnAttnBackend(AttentionBackend):
    def __init__(self, runner: Any) -> None:
        super().__init__()
        refuse_features(runner.server_args)
        missing = missing_hooks()
        if missing is not None:
            raise ConfigError(f"SGLang's hooks are {missing}; see `cairn doctor --sglang`")
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self._req_to_token: torch.Tensor = runner.req_to_token_pool.req_to_token
        model, config = runner.model, runner.model_config
        spec = getattr(model, "cairn_spec", None)
        if spec is None:
            layers = [m for m in model.modules() if isinstance(m, RadixAttention)]
            spec = describe(layers, type(model).__name__, config.vocab_size, config.context_len)
        assert isinstance(spec, ModelSpec)
        plan, geometry = read_plan(
            getattr(config.hf_config, FIELD, None),
            spec,
            runner.token_to_kv_pool.page_size,
            self._req_to_token.device.type,
        )
        self.sparse = SparseAttention(
            spec,
            plan,
            geometry,
            adopt_pool(runner.token_to_kv_pool, spec, geometry),
            max_seqs=len(self._req_to_token),
            max_tokens=self._req_to_token.shape[1],
        )
        for note in self.sparse.notes:
            _log.info(note)
        device = self._req_to_token.device
        if device.type == "cuda" and self.sparse.kernel_refusal is not None:
            _log.warning("hsa runs in plain torch: %s", self.sparse.kernel_refusal)

    # -- once per step ------------------------------------------------------------------------

    def init_forward_metadata(self, forward_batch: Any) -> None:
        mode = forward_batch.forward_mode
        if mode.is_idle():
            return
        if not (mode.is_decode() or mode.is_extend()) or forward_batch.spec_info is not None:
            raise ConfigError(f"hsa computes prefill and decode, not {mode.name} steps")
        self.sparse.begin(forward_batch, self._req_to_token)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.sparse.prepare_recording(max_bs)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        if in_capture:
            self.sparse.begin_recording(forward_batch.batch_size)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        self.sparse.begin_recorded(forward_batch, self._req_to_token)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    # -- once per layer -----------------------------------------------------------------------

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        if kwargs:
            raise ConfigError(
                f"the model hands {', '.join(kwargs)} to attention, which hsa does not know"
            )
        attend = self.sparse.attend
        if save_kv_cache:
            attend.write(layer.layer_id, torch.cat((k, v), 1))
        query = q.view(len(q), layer.tp_q_head_num, layer.head_dim)
        return attend.forward(layer.layer_id, query).flatten(1)

    forward_decode = forward_extend

    def support_triton(self) -> bool:
        return self._req_to_token.device.type == "cuda"
