"""Every option of the engine, in one place. Keyword arguments and CLI flags are made from it."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from cairn.errors import ConfigError

DEVICES = ("auto", "cpu", "cuda", "mps")
DTYPES = ("auto", "float32", "float16", "bfloat16", "float64")
MODEL_IMPLS = ("cairn", "transformers")
QUANTIZATIONS = ("none", "int8")
LOAD_FORMATS = ("auto", "dummy")
EVICTION_POLICIES = ("lru", "lfu")
STRATEGIES = ("group", "head", "softmax_head")
FUSIONS = ("landmark", "lse")
PREFILLS = ("dense", "sparse")


def _option(default: Any, text: str, choices: tuple[str, ...] | None = None) -> Any:
    return field(default=default, metadata={"help": text, "choices": choices})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    model: str = _option(
        "smollm2",
        "Model folder, .gguf file, hub id (owner/name), pulled or bundled model, or preset.",
    )
    model_impl: str = _option(
        "cairn",
        "cairn: Cairn's model code; transformers: theirs with Cairn's attention; module:function: "
        "yours.",
    )
    load_format: str = _option(
        "auto", "Read the model's weights, or draw random ones.", LOAD_FORMATS
    )
    ignore_config_fields: str = _option(
        "", "Comma-separated fields of config.json that are known not to change the output."
    )
    device: str = _option("auto", "Where to run: auto takes cuda, then mps, then cpu.", DEVICES)
    dtype: str = _option(
        "auto", "Type of weights and KV cache: auto is the checkpoint's, float32 on a CPU.", DTYPES
    )
    quantization: str = _option(
        "none", "CPU: keep weights as int8, a quarter of the bytes.", QUANTIZATIONS
    )
    tp: int = _option(
        1,
        "Ranks that share the model, a GPU each, or processes on a CPU; kv_cache_gib is per rank.",
    )
    threads: int | None = _option(
        None,
        "Threads of a process for work on the CPU, divided among ranks there; by default "
        "torch's choice, one for each core.",
    )
    context_length: int | None = _option(
        None, "Most tokens of a request, prompt and output; the model's own limit by default."
    )
    page_size: int | None = _option(
        None,
        "Rows of the KV cache in a page; 64, on CUDA without hsa 128, or the chunk size the model "
        "was trained with.",
    )
    kv_cache_gib: float | None = _option(
        None, "Memory for the KV cache. By default a quarter of what is free on a CPU."
    )
    mem_fraction_static: float | None = _option(
        None, "CUDA: share of the device for weights and KV cache together; 0.85 by default."
    )
    disable_radix_cache: bool = _option(False, "Do not reuse the KV of common prefixes.")
    eviction: str = _option("lru", "Which cached pages to give up first.", EVICTION_POLICIES)
    chunked_prefill_size: int | None = _option(
        None, "Rows a step computes for prefill and decode; 2048, on CUDA 8192."
    )
    max_running_requests: int | None = _option(
        None, "Requests in the batch at once; 64, on CUDA 256."
    )
    max_queued_requests: int = _option(10_000, "Requests that may wait; more are refused.")
    max_step_ms: float | None = _option(
        None, "Shrink prefill chunks so that a step stays under this time."
    )
    attention_backend: str | None = _option(
        None,
        "Attention kernels: auto, torch, triton, sgl_kernel, flashinfer, hsa, your own as "
        "module:Class, or a pair PREFILL,DECODE. By default ATTN_BACKEND of the environment, or "
        "auto.",
    )
    disable_cuda_graph: bool = _option(False, "CUDA: launch every kernel of a decode step anew.")
    disable_overlap_schedule: bool = _option(
        False, "CUDA: wait for a step's tokens before planning the next."
    )
    hsa_policy: str | None = _option(
        None, "hsa: how pages are scored: quest, mean, or your own as module:Class."
    )
    hsa_topk: int | None = _option(None, "hsa: pages a query reads outside its window.")
    hsa_selection_strategy: str | None = _option(
        None, "hsa: how the heads of a group agree on pages.", STRATEGIES
    )
    hsa_layers: str | None = _option(None, "hsa: sparse layers, such as 0-3,7; all by default.")
    hsa_window: int | None = _option(None, "hsa: rows a query always sees.")
    hsa_sinks: int | None = _option(None, "hsa: first pages that are always selected.")
    hsa_fusion: str | None = _option(
        None, "hsa: weigh pages by landmark score or by exact lse.", FUSIONS
    )
    hsa_prefill: str | None = _option(
        None,
        "hsa: how ordinary models read prompts. dense (the default) reads all of the past; sparse "
        "reads selected pages, on CUDA from row 65,536 on.",
        PREFILLS,
    )
    hsa_dense_below: int | None = _option(
        None,
        "hsa: rows below this position see everything. By default rows for which dense attention "
        "is not slower.",
    )
    enable_hisparse: bool = _option(
        False, "Keep the KV of sparse layers in host memory, and on the device what is read."
    )
    hisparse_config: str | None = _option(
        None,
        "JSON for enable_hisparse: top_k, device_buffer_size, host_to_device_ratio, host_gib, "
        "swap_in_block_size, async_backup.",
    )
    seed: int = _option(0, "Seeds dummy weights and the requests that bring no seed.")

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("model is empty; give a model folder or a preset's name")
        for name, choices in (
            ("device", DEVICES),
            ("dtype", DTYPES),
            ("load_format", LOAD_FORMATS),
            ("quantization", QUANTIZATIONS),
            ("eviction", EVICTION_POLICIES),
            ("hsa_selection_strategy", STRATEGIES),
            ("hsa_fusion", FUSIONS),
            ("hsa_prefill", PREFILLS),
        ):
            value = getattr(self, name)
            if value not in choices and not (value is None and name.startswith("hsa_")):
                raise ConfigError(f"{name} is {value!r}; choose one of {', '.join(choices)}")
        impl = self.model_impl
        if impl not in MODEL_IMPLS and not (isinstance(impl, str) and ":" in impl):
            raise ConfigError(
                f"model_impl is {impl!r}; choose one of {', '.join(MODEL_IMPLS)}, or name your own "
                "as module:function"
            )
        for name, low in (
            ("chunked_prefill_size", 1),
            ("max_running_requests", 1),
            ("page_size", 1),
            ("threads", 1),
            ("hsa_topk", 1),
            ("hsa_window", 1),
            ("hsa_sinks", 0),
            ("hsa_dense_below", 0),
        ):
            if getattr(self, name) is not None:
                self._check_whole(name, low)
        self._check_whole("max_queued_requests", 1)
        self._check_whole("tp", 1, 64)
        self._check_whole("seed", 0, 2**63 - 1)
        if self.context_length is not None:
            self._check_whole("context_length", 1)
        for name in ("kv_cache_gib", "max_step_ms"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and 0 < value < math.inf):
                raise ConfigError(f"{name} is {value!r}; it must be a number above 0")
        for name in (
            "model",
            "ignore_config_fields",
            "attention_backend",
            "hsa_policy",
            "hsa_layers",
            "hisparse_config",
        ):
            value = getattr(self, name)
            optional = name not in ("model", "ignore_config_fields")
            if not isinstance(value, str) and not (value is None and optional):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be a string")
        share = self.mem_fraction_static
        if share is not None:
            if not (_is_number(share) and 0 < share < 1):
                raise ConfigError(f"mem_fraction_static is {share!r}; it must be between 0 and 1")
            if self.kv_cache_gib is not None:
                raise ConfigError(
                    "mem_fraction_static and kv_cache_gib size the same pool; give one"
                )

    def _check_whole(self, name: str, low: int, high: int = 2**31 - 1) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ConfigError(
                f"{name} is {value!r}; it must be a whole number from {low} to {high}"
            )

    @classmethod
    def from_kwargs(cls, values: dict[str, Any]) -> EngineConfig:
        known = {option.name for option in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigError(
                f"unknown option {', '.join(unknown)}; known: {', '.join(sorted(known))}"
            )
        return cls(**values)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def cache_folder() -> Path:
    """Where pulled models and compiled kernels are kept: $CAIRN_CACHE, or the user's cache."""
    own = os.environ.get("CAIRN_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "cairn"
