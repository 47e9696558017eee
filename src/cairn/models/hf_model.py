"""Any transformers model on Cairn's paged attention, through transformers' own attention interface.

The model's code stays as it is; its attention layers call a function registered under our name,
which hands queries, keys and values to the step's `attend`. To learn the shapes of its layers, one
token runs through the model with a function that only records the calls.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cairn.attention.attend import Attend
from cairn.errors import ConfigError, LoadError, install
from cairn.models.interface import LanguageModel
from cairn.models.spec import AttentionSpec, ModelSpec

_NAME = "cairn_paged"

# What models pass along that does not change a forward pass without dropout, cache and mask.
_HARMLESS = {"dropout", "is_causal", "position_ids", "use_cache", "cache_position"}
_HARMLESS |= {"output_attentions", "output_hidden_states", "output_router_logits", "return_dict"}


@dataclass(frozen=True, slots=True)
class _Layer:
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    window: int | None


def load_transformers_model(
    folder: Path, dtype: torch.dtype, device: torch.device
) -> TransformersModel:
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError(
            f"model_impl=transformers needs the transformers package: {install('hf')}"
        ) from error
    AttentionInterface.register(_NAME, _attention)
    # Our attention does the masking, so transformers need not make a mask.
    AttentionMaskInterface.register(_NAME, lambda *args, **kwargs: None)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=_NAME, local_files_only=True
        )
    except Exception as error:  # any model's own code may run here
        raise LoadError(f"transformers cannot load {folder}: {error}") from error
    return TransformersModel(model.eval().to(device), str(folder))


class TransformersModel(LanguageModel):
    def __init__(self, model: Any, source: str) -> None:
        self._model = model
        config = model.config.get_text_config()
        layers = _probe(model, source)
        self._check_rope(config, source)
        self._check_masks(config, layers, source)
        self.spec = ModelSpec(
            architecture=type(model).__name__,
            vocab_size=config.vocab_size,
            layers=tuple(
                AttentionSpec(
                    layer.heads, layer.kv_heads, layer.head_dim, layers[0].scale, layer.window
                )
                for layer in layers
            ),
            context_length=config.max_position_embeddings,
        )

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        lengths: torch.Tensor,
        attend: Attend,
        logit_rows: torch.Tensor | None,
    ) -> torch.Tensor:
        logits: torch.Tensor = self._model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=0 if logit_rows is None else logit_rows,
            cairn_attend=attend,
        ).logits[0]
        return logits[:, : self.spec.vocab_size]

    @staticmethod
    def _check_rope(config: Any, source: str) -> None:
        """Rope that depends on the batch's longest sequence would mix up its requests."""
        rope = getattr(config, "rope_parameters", None) or {}
        for values in [rope, *rope.values()]:
            if isinstance(values, dict) and values.get("rope_type") in ("dynamic", "longrope"):
                raise ConfigError(
                    f"{source}: rope type {values['rope_type']!r} depends on the sequence length "
                    "and is not supported with model_impl=transformers"
                )

    @staticmethod
    def _check_masks(config: Any, layers: list[_Layer], source: str) -> None:
        """Restrictions a model only puts into its mask never reach our attention."""
        if getattr(config, "attention_chunk_size", None):
            raise ConfigError(f"{source}: attention_chunk_size is not supported")
        types = getattr(config, "layer_types", None) or []
        for index, (kind, layer) in enumerate(zip(types, layers, strict=False)):
            if kind not in ("full_attention", "sliding_attention"):
                raise ConfigError(f"{source}: layer_types[{index}] is {kind!r}: not supported")
            if kind == "sliding_attention" and layer.window is None:
                raise ConfigError(
                    f"{source}: layer {index} is {kind} but does not pass its window on to "
                    "attention; such models are not supported"
                )


def _attention(
    module: nn.Module,
    query: torch.Tensor,  # [1, heads, rows, head_dim]
    key: torch.Tensor,  # [1, kv_heads, rows, head_dim]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    cairn_attend: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls instead of its own attention."""
    if cairn_attend is None:
        raise RuntimeError("cairn's attention was called outside of an engine step")
    if isinstance(cairn_attend, _Probe):
        return cairn_attend.record(module, query, key, value, scaling, kwargs), None
    layer: int = module.layer_idx  # type: ignore[assignment]
    # [1, heads, rows, dim] -> [rows, heads, dim]
    key_value = torch.cat((key[0], value[0])).transpose(0, 1)
    out: torch.Tensor = cairn_attend(layer, query[0].transpose(0, 1), key_value)
    return out[None], None


class _Probe:
    """Records every attention call, by layer."""

    def __init__(self, source: str) -> None:
        self._source = source
        self.layers: dict[int, _Layer] = {}

    def record(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        kwargs: dict[str, Any],
    ) -> torch.Tensor:
        window = kwargs.pop("sliding_window", None)
        for name, given in kwargs.items():
            if given is not None and name not in _HARMLESS:
                raise ConfigError(
                    f"{self._source}: its attention uses {name} = {given!r}, which Cairn's "
                    "attention does not support"
                )
        if not getattr(module, "is_causal", True):
            raise ConfigError(f"{self._source}: its attention is not causal")
        index = getattr(module, "layer_idx", None)
        if not isinstance(index, int) or index in self.layers:
            raise ConfigError(f"{self._source}: its attention layers are not numbered one by one")
        self.layers[index] = _Layer(
            heads=query.shape[1],
            kv_heads=key.shape[1],
            head_dim=query.shape[3],
            value_dim=value.shape[3],
            scale=query.shape[3] ** -0.5 if scaling is None else scaling,
            window=window,
        )
        return query.transpose(1, 2)


@torch.inference_mode()
def _probe(model: Any, source: str) -> list[_Layer]:
    probe = _Probe(source)
    device = next(model.parameters()).device
    token = torch.zeros(1, 1, dtype=torch.int64, device=device)
    try:
        model(input_ids=token, position_ids=token, use_cache=False, cairn_attend=probe)
    except ConfigError:
        raise
    except Exception as error:  # any model's own code runs here
        raise ConfigError(
            f"{source}: {type(model).__name__} does not run on a registered attention function: "
            f"{error!r}"
        ) from error
    layers = [probe.layers[index] for index in sorted(probe.layers)]
    expected = model.config.get_text_config().num_hidden_layers
    if sorted(probe.layers) != list(range(expected)):
        raise ConfigError(
            f"{source}: {len(layers)} of its {expected} layers call transformers' attention "
            "interface; models with other kinds of layers are not supported"
        )
    first = layers[0]
    same_size = (first.heads, first.kv_heads, first.head_dim, first.head_dim)
    for layer in layers:
        if (layer.heads, layer.kv_heads, layer.head_dim, layer.value_dim) != same_size:
            raise ConfigError(f"{source}: its layers differ in heads or head size: {layers}")
        if not math.isclose(layer.scale, first.scale):
            raise ConfigError(f"{source}: its layers differ in the scale of attention: {layers}")
    return layers
