"""Every option of the engine, in one place. Keyword arguments and CLI flags are made from it."""

from __future__ import annotations

import math
import os
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from cairn.errors import ConfigError

MODEL_IMPLS = ("cairn", "transformers")
_LARGEST = 2**31 - 1


def _option(
    default: Any, text: str, *choices: str, low: int | None = None, high: int = _LARGEST
) -> Any:
    """A field with its help text: one of `choices`, a whole number from `low` to `high`, or any
    value of the field's type."""
    return field(
        default=default, metadata={"help": text, "choices": choices, "low": low, "high": high}
    )


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
        "auto", "Read the model's weights, or draw random ones.", "auto", "dummy"
    )
    ignore_config_fields: str = _option(
        "", "Comma-separated fields of config.json that are known not to change the output."
    )
    device: str = _option(
        "auto", "Where to run: auto takes cuda, then mps, then cpu.", "auto", "cpu", "cuda", "mps"
    )
    dtype: str = _option(
        "auto",
        "Type of weights: auto is the checkpoint's, float32 on a CPU.",
        "auto",
        "float32",
        "float16",
        "bfloat16",
        "float64",
    )
    kv_cache_dtype: str = _option("auto", "Type of the KV cache: auto is that of the weights.")
    quantization: str = _option(
        "none", "CPU: keep weights as int8, a quarter of the bytes.", "none", "int8"
    )
    tp: int = _option(
        1,
        "Ranks that share the model, a GPU each, or processes on a CPU; kv_cache_gib is per rank.",
        low=1,
        high=64,
    )
    threads: int | None = _option(
        None,
        "Threads of a process for work on the CPU, divided among ranks there; by default "
        "torch's choice, one for each core.",
        low=1,
    )
    context_length: int | None = _option(
        None,
        "Most tokens of a request, prompt and output; the model's own limit by default.",
        low=1,
    )
    page_size: int | None = _option(
        None,
        "Rows of the KV cache in a page; 64, on CUDA without hsa 128, or the chunk size the model "
        "was trained with.",
        low=1,
    )
    kv_cache_gib: float | None = _option(
        None, "Memory for the KV cache. By default a quarter of what is free on a CPU."
    )
    mem_fraction_static: float | None = _option(
        None, "CUDA: share of the device for weights and KV cache together; 0.85 by default."
    )
    disable_radix_cache: bool = _option(False, "Do not reuse the KV of common prefixes.")
    eviction: str = _option("lru", "Which cached pages to give up first.", "lru", "lfu")
    chunked_prefill_size: int | None = _option(
        None, "Rows a step computes for prefill and decode; 2048, on CUDA 8192.", low=1
    )
    max_running_requests: int | None = _option(
        None, "Requests in the batch at once; 64, on CUDA 256.", low=1
    )
    max_queued_requests: int = _option(10_000, "Requests that may wait; more are refused.", low=1)
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
    hsa_topk: int | None = _option(None, "hsa: pages a query reads outside its window.", low=1)
    hsa_selection_strategy: str | None = _option(
        None, "hsa: how the heads of a group agree on pages.", "group", "head", "softmax_head"
    )
    hsa_layers: str | None = _option(None, "hsa: sparse layers, such as 0-3,7; all by default.")
    hsa_window: int | None = _option(None, "hsa: rows a query always sees.", low=1)
    hsa_sinks: int | None = _option(None, "hsa: first pages that are always selected.", low=0)
    hsa_fusion: str | None = _option(
        None, "hsa: weigh pages by landmark score or by exact lse.", "landmark", "lse"
    )
    hsa_prefill: str | None = _option(
        None,
        "hsa: how ordinary models read prompts. dense (the default) reads all of the past; sparse "
        "reads selected pages, on CUDA from row 65,536 on.",
        "dense",
        "sparse",
    )
    hsa_dense_below: int | None = _option(
        None,
        "hsa: rows below this position see everything. By default rows for which dense attention "
        "is not slower.",
        low=0,
    )
    enable_hisparse: bool = _option(
        False, "Keep the KV of sparse layers in host memory, and on the device what is read."
    )
    hisparse_config: str | None = _option(
        None,
        "JSON for enable_hisparse: top_k, device_buffer_size, host_to_device_ratio, host_gib, "
        "swap_in_block_size, async_backup.",
    )
    seed: int = _option(
        0, "Seeds dummy weights and the requests that bring no seed.", low=0, high=2**63 - 1
    )

    def __post_init__(self) -> None:
        for option in fields(self):
            if getattr(self, option.name) is not None or option.default is not None:
                self._check(option)
        if not self.model:
            raise ConfigError("model is empty; give a model folder or a preset's name")
        if self.model_impl not in MODEL_IMPLS and ":" not in self.model_impl:
            raise ConfigError(
                f"model_impl is {self.model_impl!r}; choose one of {', '.join(MODEL_IMPLS)}, or "
                "name your own as module:function"
            )
        if self.kv_cache_dtype != "auto":
            raise ConfigError(
                f"kv_cache_dtype is {self.kv_cache_dtype!r}; the cache has the type of the weights "
                "so far, types of 8 bits will come: use auto"
            )
        if self.mem_fraction_static is not None:
            if self.mem_fraction_static >= 1:
                raise ConfigError(
                    f"mem_fraction_static is {self.mem_fraction_static!r}; it must be between 0 "
                    "and 1"
                )
            if self.kv_cache_gib is not None:
                raise ConfigError(
                    "mem_fraction_static and kv_cache_gib size the same pool; give one"
                )

    def _check(self, option: Field[Any]) -> None:
        """Raise ConfigError if a value is not what its option takes."""
        value, rule, kind = getattr(self, option.name), option.metadata, str(option.type)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        wanted = None
        if rule["choices"]:
            if value not in rule["choices"]:
                wanted = f"choose one of {', '.join(rule['choices'])}"
        elif rule["low"] is not None:
            low, high = rule["low"], rule["high"]
            if not (number and isinstance(value, int) and low <= value <= high):
                wanted = f"it must be a whole number from {low} to {high}"
        elif kind.startswith("float"):
            if not (number and 0 < value < math.inf):
                wanted = "it must be a number above 0"
        elif kind.startswith("str") and not isinstance(value, str):
            wanted = "it must be a string"
        if wanted is not None:
            raise ConfigError(f"{option.name} is {value!r}; {wanted}")

    @classmethod
    def from_kwargs(cls, values: dict[str, Any]) -> EngineConfig:
        known = {option.name for option in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigError(
                f"unknown option {', '.join(unknown)}; known: {', '.join(sorted(known))}"
            )
        return cls(**values)


def cache_folder() -> Path:
    """Where pulled models and compiled kernels are kept: $CAIRN_CACHE, or the user's cache."""
    own = os.environ.get("CAIRN_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "cairn"
